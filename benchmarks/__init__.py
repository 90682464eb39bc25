"""Benchmarks that developers of mbaas run from a checkout: ``python -m benchmarks --help``."""

from mbaas.fields import LABEL, SAMPLE_ID

ID_BYTES = LABEL.nbytes + SAMPLE_ID.nbytes
"""Bytes that come beside the image of a sample."""
