"""Benchmarks that developers of mbaas run from a checkout: ``python -m benchmarks --help``."""
