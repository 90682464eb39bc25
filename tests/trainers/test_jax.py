"""Minibatches convert to JAX arrays. JAX is not among the test dependencies: ``pip install jax``."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_feeds import EVERY, join

jax = pytest.importorskip("jax", reason="pip install jax")

pytestmark = pytest.mark.usefixtures("ray_clean")


def test_tensors_become_arrays_by_dlpack_without_a_copy(training):
    seen: list[int] = []
    with join(training, "jax") as loader:
        for batch in loader:
            image, nhwc = batch["image"], batch["image"].permute(0, 2, 3, 1)
            for tensor in (image, nhwc):
                array = jax.numpy.from_dlpack(tensor)
                assert array.unsafe_buffer_pointer() == image.data_ptr()
                np.testing.assert_array_equal(array, tensor.numpy())
            ids = jax.numpy.from_dlpack(batch["sample_id"])
            assert ids.dtype == jax.numpy.int32, "by default JAX has no int64"
            seen += ids.tolist()
        assert sorted(seen) == EVERY
        assert loader.ledger.exact


def test_views_of_numpy_are_copied(training):
    """NumPy views are read-only, which DLPack cannot express."""
    with join(training, "jax", format="numpy") as loader:
        labels = next(iter(loader))["label"]
        with pytest.raises(BufferError, match="readonly"):
            jax.numpy.from_dlpack(labels)
        copy = jax.numpy.array(labels)
        assert copy.unsafe_buffer_pointer() != labels.ctypes.data
        assert copy.tolist() == labels.tolist()
        del labels
