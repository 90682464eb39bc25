"""Listing, fingerprinting and pickling take bounded memory per image.

Run as a program, this file measures any number of images:

    python tests/dataset/test_scale.py 10000000

Ten million images with 32-byte names, on 21 November 2026 (AMD EPYC, 2 cores, Python 3.11, pyarrow 26):

    generate, list and fingerprint   33 s
    pickle                           1 ms
    peak memory                      1.28 GB, or 128 bytes per image
"""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
import time
from typing import Any

import pytest
from generated_tree import IMAGES_PER_CLASS, NAME_BYTES, GeneratedTree
from pyarrow.fs import PyFileSystem

from mbaas.dataset import read_images


def measure(num_images: int) -> dict[str, Any]:
    """Time and memory to list and pickle a generated tree; memory is the growth of this process's peak, in bytes."""
    filesystem = PyFileSystem(GeneratedTree(num_images))
    read_images("tree", filesystem=PyFileSystem(GeneratedTree(10 * IMAGES_PER_CLASS)))  # loads the code
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    data = read_images("tree", filesystem=filesystem)
    listed_s = time.perf_counter() - start
    listing_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    start = time.perf_counter()
    buffers: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    pickled_s = time.perf_counter() - start
    all_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {
        "images": len(data),
        "seconds to list and fingerprint": round(listed_s, 2),
        "seconds to pickle": round(pickled_s, 4),
        "peak bytes an image, listing": listing_bytes / len(data),
        "peak bytes an image, pickling too": all_bytes / len(data),
        "pickle bytes in band": len(in_band),
        "pickle bytes an image out of band": sum(len(buffer.raw()) for buffer in buffers) / len(data),
        "pickle buffers": len(buffers),
    }


@pytest.mark.slow
def test_listing_and_pickling_take_a_bounded_number_of_bytes_for_each_image() -> None:
    """Each image takes 32 bytes and its name; names exist twice while their chunks are joined.

    The measurement runs in a subprocess, because a process cannot reset its memory peak.
    """
    done = subprocess.run([sys.executable, __file__, "300000"], capture_output=True, text=True, check=True)
    took = json.loads(done.stdout)
    assert took["images"] == 300_000
    assert took["pickle bytes an image out of band"] < 32 + NAME_BYTES + 1
    assert took["pickle bytes in band"] < 20 * 300  # mainly the names of 300 classes
    assert took["pickle buffers"] == 5
    assert took["peak bytes an image, listing"] < 200
    assert took["peak bytes an image, pickling too"] < 200


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1])), indent=2))
