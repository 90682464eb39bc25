"""Torchvision and Albumentations: transforms written with these libraries, as steps of a pipeline.

Both libraries draw from generators of their own. They are seeded here for each sample and epoch, so a sample has the
same pixels in every trial, on every node and in every retry.
"""

from __future__ import annotations

import copy
import importlib.util
import random
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.transforms import checks
from mbaas.transforms.function import Map, check_pickles, digest_of, name_of

Taken: TypeAlias = Literal["PIL", "tensor"]
"""A PIL image, as torchvision's ImageFolder returns it, or a tensor uint8 [3, height, width]."""

_GLOBAL_GENERATORS = threading.Lock()
"""Held while the process's generators are seeded for one sample."""


class LibraryTransform(Map):
    """A transform of a library, which gets an image uint8 [height, width, 3] and a generator."""

    @property
    def _runs(self) -> Any:
        return self.fn

    @property
    def user_code(self) -> str:
        return name_of(self._runs.transform)

    @property
    def dali_limit(self) -> str:
        return f"runs no {type(self).__name__}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' '.join(repr(self._runs.transform).split())}{self._options})"

    def identity(self) -> str:
        """Return a hash of the transform's parameters, and of the code of functions in it."""
        return f"{type(self).__name__}({self._runs.digest}{self._options})"


class Torchvision(LibraryTransform):
    """Run a torchvision transform, such as ``v2.Compose([...])``, on each image.

    ``transform`` takes a PIL image, as from torchvision's ``ImageFolder``, or with ``takes="tensor"`` a tensor uint8
    [3, height, width]. It returns an image or a tensor. Tensors are delivered as returned, such as float32
    [3, height, width] after ``Normalize``; later transforms of this pipeline need an image or a uint8 tensor
    [3, height, width].

    Before each call, the generators of torch, NumPy and Python's ``random`` are seeded from this sample, epoch and
    position in the pipeline. They belong to the whole process, so a prep worker makes these calls one after the other:
    serve the feed with more ``prep_workers`` rather than with more ``threads.prep``.

    Boxes, keypoints and masks do not move with the pixels. Any callable that takes a PIL image or a tensor will do.

    Args:
        transform: the transform or composition; anything that can be called and pickled.
        takes: "PIL" or "tensor".
        deterministic: whether the result for an image is always the same. It may then be cached.

    Raises:
        ConfigError: the transform cannot be called, pickled or identified, or Pillow is not installed.
    """

    def __init__(self, transform: Callable[[Any], Any], *, takes: Taken = "PIL", deterministic: bool = False) -> None:
        checks.one_of("Torchvision's takes", takes, names=get_args(Taken))
        if takes == "PIL" and importlib.util.find_spec("PIL") is None:
            raise ConfigError("Torchvision gives PIL images, but Pillow is not installed: pip install pillow")
        super().__init__(_RunsTorchvision(transform, takes), deterministic=deterministic)


class Albumentations(LibraryTransform):
    """Run an Albumentations transform, such as ``A.Compose([...])``, on each image.

    ``transform`` is called as ``transform(image=image)["image"]`` with an image uint8 [height, width, 3] in RGB. It is
    seeded from this sample, epoch and position in the pipeline; a seed of its own is not used. Arrays and tensors are
    delivered as returned; later transforms of this pipeline need uint8 [height, width, 3].

    Boxes, keypoints and masks do not move with the pixels. A `Map` with ``fields`` can call Albumentations with them.

    Args:
        transform: the composition: one of Albumentations 2, which can be seeded.
        deterministic: whether the result for an image is always the same. It may then be cached.

    Raises:
        ConfigError: the transform cannot be seeded, pickled or identified.
    """

    def __init__(self, transform: Any, *, deterministic: bool = False) -> None:
        super().__init__(_RunsAlbumentations(transform), deterministic=deterministic)


class _RunsTorchvision:
    """Calls a transform for an image; ``digest`` identifies its parameters, as in `_RunsAlbumentations`."""

    def __init__(self, transform: Callable[[Any], Any], takes: Taken) -> None:
        if not callable(transform):
            raise checks.refused("Torchvision's transform", "must be a transform, which can be called", transform)
        check_pickles("Torchvision's transform", transform)
        self.transform, self.takes, self.digest = transform, takes, digest_of([transform, takes])

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator | None = None) -> NDArray[Any]:
        import torch
        from PIL import Image

        given: Any = Image.fromarray(image) if self.takes == "PIL" else torch.from_numpy(image).permute(2, 0, 1)
        if rng is None:
            return _array(self.transform(given))
        seed = int(rng.integers(2**32))
        with _GLOBAL_GENERATORS:
            before = torch.get_rng_state(), np.random.get_state(), random.getstate()
            try:
                torch.default_generator.manual_seed(seed)
                np.random.seed(seed)
                random.seed(seed)
                return _array(self.transform(given))
            finally:
                torch.set_rng_state(before[0])
                np.random.set_state(before[1])
                random.setstate(before[2])


class _RunsAlbumentations:
    def __init__(self, transform: Any) -> None:
        if not callable(getattr(transform, "set_random_seed", None)):
            raise checks.refused("Albumentations's transform", "must be a Compose of Albumentations 2", transform)
        check_pickles("Albumentations's transform", transform)
        try:
            described = transform.to_dict()["transform"]
        except Exception as error:  # of a Lambda without a name, for instance
            raise ConfigError(f"{name_of(transform)} cannot be identified: {error}", option="transform") from error
        self.transform, self.digest, self._own = transform, digest_of(described), threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"transform": self.transform, "digest": self.digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._own = threading.local()

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator | None = None) -> NDArray[Any]:
        # Each thread has its own copy, because generators are in the transforms.
        transform = getattr(self._own, "transform", None)
        if transform is None:
            transform = self._own.transform = copy.deepcopy(self.transform)
        transform.set_random_seed(0 if rng is None else int(rng.integers(2**32)))
        return _array(transform(image=image)["image"])


def _array(result: Any) -> NDArray[Any]:
    """Return a PIL image, tensor or array as an array; uint8 images are [height, width, 3]."""
    if not hasattr(result, "permute"):  # not a tensor
        array = np.array(result)
        if array.dtype.hasobject:
            raise TypeError(f"it must return an image, a tensor or an array, got {type(result).__name__}")
        return array
    array = np.asarray(result.numpy(force=True))
    is_image = array.dtype == np.uint8 and array.ndim == 3 and array.shape[0] == 3
    return np.ascontiguousarray(array.transpose(1, 2, 0)) if is_image else array
