"""Random changes of whole minibatches, which run in the consumer: MixUp and CutMix."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np

from mbaas.errors import ConfigError, shown
from mbaas.samples.fields import BatchTransform
from mbaas.transforms import checks
from mbaas.transforms.base import Parameters


@dataclass(frozen=True, kw_only=True)
class _Mixing(Parameters, BatchTransform):
    alpha: Annotated[float, checks.number] = 1.0
    num_classes: Annotated[int | None, partial(checks.whole, least=2)] = None
    image: str = "image"
    label: str = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha <= 0.0:
            raise self._refused("alpha", "must be above 0")

    def apply(self, batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        images, labels = (self._column(batch, key) for key in (self.image, self.label))
        labels = self._soft(labels)
        mixed, own = self._mixed(images, rng)
        return {**batch, self.image: mixed, self.label: labels * own + _partners(labels) * (1.0 - own)}

    @abstractmethod
    def _mixed(self, images: Any, rng: np.random.Generator) -> tuple[Any, float]:
        """Return mixed images, and the weight of their own labels."""

    def _weight(self, rng: np.random.Generator) -> float:
        return float(rng.beta(self.alpha, self.alpha))

    def _column(self, batch: dict[str, Any], key: str) -> Any:
        if key not in batch:
            raise ConfigError(f"{type(self).__name__} needs {key!r}, got a minibatch of {', '.join(map(repr, batch))}")
        if isinstance(batch[key], list):
            raise ConfigError(f"{type(self).__name__} needs {key!r} of one size, got a list of different sizes")
        return batch[key]

    def _soft(self, labels: Any) -> Any:
        """Return labels as floats [n, classes]: class numbers as one-hot rows, other rows as they are."""
        name, count, is_numpy = type(self).__name__, self.num_classes, isinstance(labels, np.ndarray)
        if labels.ndim == 2 and "float" in str(labels.dtype):
            return labels
        if labels.ndim == 2:
            return labels.astype(np.float32) if is_numpy else labels.float()
        if labels.ndim != 1:
            raise ConfigError(f"{name} needs labels [n] or [n, classes], got shape {tuple(labels.shape)}")
        if "int" not in str(labels.dtype):
            raise ConfigError(f"{name} needs whole numbers as labels [n], got {labels.dtype}")
        if count is None:
            raise ConfigError(
                f"{name} needs num_classes for labels that are class numbers, such as {name}(num_classes=10)",
                option="num_classes",
            )
        # On a GPU, the check would wait for all work that was started there; one_hot fails there by itself.
        if is_numpy or not labels.is_cuda:
            least, most = int(labels.min()), int(labels.max())
            if least < 0 or most >= count:
                raise ConfigError(
                    f"{name}'s labels must be in [0, {count - 1}], got {least} to {most}", option="num_classes"
                )
        if is_numpy:
            return (labels[:, None] == np.arange(count)).astype(np.float32)
        import torch  # here: it takes 1.5 s, and consumers of NumPy arrays do not need it

        return torch.nn.functional.one_hot(labels.long(), count).float()


class MixUp(_Mixing):
    """Blend each image and label of a minibatch with another image and its label (Zhang et al., 2018).

    Like torchvision's ``MixUp``: the other image is the previous one in the minibatch, and one weight for all is drawn
    from Beta(alpha, alpha). Pass it as ``batch_fn`` to `mbaas.join` or `tune_integration.get_loader`: it
    runs in the consumer, so trials with different ``alpha`` share all prepared samples. What it draws depends only on
    the seed, the epoch, the minibatch's position in it and the rank.

    The pipeline must end with Normalize or ToFloat, because images must be floats.

    Args:
        alpha: parameter of the Beta distribution, above 0.
        num_classes: number of classes. Labels become float32[n, num_classes], each row with sum 1. None if labels
            are already rows of probabilities.
        image, label: keys of the minibatch, after ``columns``.

    Raises:
        ConfigError: for a minibatch without these keys, images that are not floats or differ in size, or a label
            that is no class.
    """

    def _mixed(self, images: Any, rng: np.random.Generator) -> tuple[Any, float]:
        if "float" not in str(images.dtype):
            raise ConfigError(
                f"MixUp needs float images, got {images.dtype}: end the pipeline with Normalize or ToFloat"
            )
        own = self._weight(rng)
        return images * own + _partners(images) * (1.0 - own), own


class CutMix(_Mixing):
    """Replace a random window of each image by that of another one, and mix labels by area (Yun et al., 2019).

    Like torchvision's ``CutMix``: the other image is the previous one in the minibatch, and one window for all is
    drawn. Its share of the image's area is from Beta(alpha, alpha), minus the part outside of the image. It runs where
    `MixUp` does, and draws as `MixUp` does. Images may have any dtype.

    Args:
        alpha: parameter of the Beta distribution, above 0.
        num_classes: number of classes. Labels become float32[n, num_classes], each row with sum 1. None if labels
            are already rows of probabilities.
        image, label: keys of the minibatch, after ``columns``. Images are [n, channels, height, width] in torch, and
            [n, height, width, channels] in NumPy.

    Raises:
        ConfigError: for a minibatch without these keys, images that differ in size, or a label that is no class.
    """

    def _mixed(self, images: Any, rng: np.random.Generator) -> tuple[Any, float]:
        is_numpy = isinstance(images, np.ndarray)
        if images.ndim != 4:
            raise ConfigError(f"CutMix needs images with 4 axes, got shape {shown(tuple(images.shape))}")
        height, width = images.shape[1:3] if is_numpy else images.shape[2:]
        x, y = int(rng.integers(width)), int(rng.integers(height))
        half = 0.5 * (1.0 - self._weight(rng)) ** 0.5
        half_width, half_height = int(half * width), int(half * height)
        rows = slice(max(y - half_height, 0), min(y + half_height, height))
        columns = slice(max(x - half_width, 0), min(x + half_width, width))
        window = (slice(None), rows, columns) if is_numpy else (..., rows, columns)
        mixed = images.copy() if is_numpy else images.clone()
        mixed[window] = _partners(images[window])
        return mixed, 1.0 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)


def _partners(column: Any) -> Any:
    """Return a copy in which each row is the one before it, and the first is the last."""
    return np.roll(column, 1, axis=0) if isinstance(column, np.ndarray) else column.roll(1, 0)
