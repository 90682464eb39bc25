"""Benchmarks that developers of mbaas run from a checkout: ``python -m benchmarks --help``."""

from mbaas.samples.fields import LABEL, SAMPLE_ID

ID_BYTES = LABEL.nbytes + SAMPLE_ID.nbytes
"""Bytes of label and sample id, stored with the image of each sample."""
