"""Datasets: which samples exist, what is known of them, and how their bytes are read."""

from mbaas.dataset.base import Dataset, SampleReader
from mbaas.dataset.listing import IMAGE_EXTENSIONS, read_images
from mbaas.dataset.manifest import read_manifest
from mbaas.dataset.synthetic import synthetic

__all__ = ["IMAGE_EXTENSIONS", "Dataset", "SampleReader", "read_images", "read_manifest", "synthetic"]
