"""Converts minibatches to a trial's format: NumPy views, private torch tensors, or tensors on a device.

Fields whose values differ in length are collated as a list, padded, or packed. Their values pass through the converter
as plain arrays. Images of different sizes differ in their first two lengths, their masks in three. They pass through
the converter as one run of pixels, so that no padding is copied or normalized, and are cut or padded afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.client.batches import RecycledMemory, is_private, read_only
from mbaas.errors import ConfigError
from mbaas.memory import pinned, slots
from mbaas.samples.fields import IMAGE, Arrays, BatchTransform, Field, Packed
from mbaas.wire.samples import SampleSpec

if TYPE_CHECKING:
    import torch

    from mbaas.transforms import Normalize

FORMATS = ("torch", "numpy")

LEAST_LENT_BYTES = 2**18
"""Smaller arrays are copied, which is as fast as finding their memory and letting the GPU read it."""

Minibatch = dict[str, Any]
"""A trial's minibatch, with keys such as ``image``, ``label`` and ``sample_id``; see `mbaas.loader.Loader`."""

BatchFunction: TypeAlias = Callable[[Minibatch], Any] | BatchTransform
"""A trial's own change of each minibatch."""


class Converter(Protocol):
    """Converts the arrays of a minibatch to the trial's format. It does not modify shared arrays (`is_private`)."""

    ahead: int
    """Number of minibatches to start beyond the next one to finish; 0 without background work."""

    def start(self, arrays: Arrays) -> Any:
        """Begin to convert a minibatch. Pass the results to `finish` in the same order."""

    def finish(self, started: Any) -> Minibatch:
        """Return the minibatch for a result of `start`, ready for use."""


def make_converter(
    format: str,
    device: Any,
    normalize: Normalize | None,
    *,
    has_images: bool = True,
    memory: RecycledMemory | None = None,
) -> Converter:
    """Return the converter for ``format`` and ``device``; see `mbaas.join`. Raises `ConfigError` if they are invalid.

    ``has_images`` is True if DecodeImage is the first step for field "image", which then becomes channels-first in
    torch. All other fields keep their axes, whatever their shape. ``memory`` is for private copies.
    """
    if format not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")
    if format == "numpy":
        if device is not None:
            raise ConfigError(f"device needs format='torch'; got format='numpy' and device={device!r}")
        return NumpyConverter(normalize)
    return _torch_converter(device, normalize, has_images, RecycledMemory() if memory is None else memory)


def _torch_converter(device: Any, normalize: Normalize | None, has_images: bool, memory: RecycledMemory) -> Converter:
    import torch  # imported here and below because it is slow, and trials with NumPy do not need it

    try:
        target = torch.device(device if device is not None else "cpu")
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must name a torch device such as 'cuda:0', got {device!r}: {error}") from None
    if target.type != "cuda":
        return TorchConverter(target, normalize, has_images, memory)
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was requested, but torch finds no CUDA device in this process")
    return CudaConverter(target, normalize, has_images)


class NumpyConverter:
    """Returns read-only arrays, views of the object store where possible. Normalized images are private copies."""

    ahead = 0

    def __init__(self, normalize: Normalize | None) -> None:
        self._normalize = normalize

    def start(self, arrays: Arrays) -> Arrays:
        # Make all arrays read-only, so that a trial does not work with some minibatches and fail with others.
        return {name: read_only(array) for name, array in arrays.items()}

    def finish(self, started: Arrays) -> Minibatch:
        if self._normalize is None:
            return dict(started)
        return {**started, "image": self._normalize.apply_numpy(started["image"])}


class TorchConverter:
    """Returns private tensors: torch has no read-only memory, so it must never see shared arrays."""

    ahead = 0

    def __init__(
        self, device: torch.device, normalize: Normalize | None, has_images: bool, memory: RecycledMemory
    ) -> None:
        self._device, self._normalize, self._has_images = device, normalize, has_images
        self._memory = memory

    def start(self, arrays: Arrays) -> Minibatch:
        import torch

        own = {name: array if is_private(array) else self._memory.copy(array) for name, array in arrays.items()}
        return {name: torch.from_numpy(array) for name, array in own.items()}

    def finish(self, started: Minibatch) -> Minibatch:
        batch = {name: tensor.to(self._device) for name, tensor in started.items()}
        if self._has_images:
            batch["image"] = _as_torch(batch["image"], self._normalize)
        return batch


class _CopySet:
    """Sources of a minibatch's copies, kept while the GPU may read them."""

    def __init__(self) -> None:
        import torch

        self.pinned: dict[str, torch.Tensor] = {}  # reused, because pinning costs far more than copying
        self.lent: list[NDArray[Any]] = []  # read by the GPU in place
        self.copied = torch.cuda.Event()  # after the last copy

    def wait(self) -> None:
        self.copied.synchronize()
        self.lent.clear()


class CudaConverter:
    """Returns tensors on a GPU. Copies and normalization run in a separate CUDA stream, one minibatch ahead.

    The GPU reads arrays in a worker's slots directly, and their block is held meanwhile. All other arrays go through
    pinned memory, without which CUDA copies synchronously.
    """

    ahead = 1

    def __init__(self, device: torch.device, normalize: Normalize | None, has_images: bool) -> None:
        import torch

        self._device, self._normalize, self._has_images = device, normalize, has_images
        self._stream = torch.cuda.Stream(device)
        self._gpu: pinned.Gpu | None
        try:
            self._gpu = pinned.gpu(self._stream.device.index)
        except OSError:  # a driver of another kind, such as ROCm: all arrays go through pinned memory
            self._gpu = None
        self._sets = [_CopySet(), _CopySet()]  # one is filled while the GPU may still read the other
        self._started = self._finished = 0

    def start(self, arrays: Arrays) -> tuple[Minibatch, torch.cuda.Event]:
        import torch

        copies = self._sets[self._started % 2]
        for each in self._sets:
            if each is copies or each.copied.query():
                each.wait()
        self._started += 1
        with torch.cuda.stream(self._stream):
            batch = {name: self._to_device(copies, name, array) for name, array in arrays.items()}
            copies.copied.record(self._stream)
            if self._has_images:
                batch["image"] = _as_torch(batch["image"], self._normalize)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return batch, ready

    def _to_device(self, copies: _CopySet, name: str, array: NDArray[Any]) -> torch.Tensor:
        import torch

        dtype = getattr(torch, str(array.dtype))
        if self._gpu is not None and _can_lend(array, self._gpu):
            tensor = torch.empty(array.shape, dtype=dtype, device=self._device)
            self._gpu.copy_to_device(tensor.data_ptr(), array, self._stream.cuda_stream)
            copies.lent.append(array)
            return tensor
        buffer = copies.pinned.get(name)
        if buffer is None or buffer.numel() < array.size:
            buffer = copies.pinned[name] = torch.empty(array.size, dtype=dtype, pin_memory=True)
        pinned = buffer[: array.size].view(array.shape)
        np.copyto(pinned.numpy(), array)
        return pinned.to(self._device, non_blocking=True)

    def finish(self, started: tuple[Minibatch, torch.cuda.Event]) -> Minibatch:
        import torch

        batch, ready = started
        self._finished += 1
        if self._finished == self._started:  # the last minibatch for now: lend nothing while none is requested
            for each in self._sets:
                each.wait()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        for tensor in batch.values():  # otherwise the allocator may reuse the memory while the trial's kernels read it
            tensor.record_stream(current)
        return batch


def _can_lend(array: NDArray[Any], gpu: pinned.Gpu) -> bool:
    """Page-lock the slot of an array. Return whether the GPU can read it in place."""
    if is_private(array) or array.nbytes < LEAST_LENT_BYTES or not array.flags.c_contiguous:
        return False
    room = slots.room_of(array)
    if room is None:
        return False
    if room in pinned.page_locks:
        return True
    pinned.page_locks.let_go(lambda memory: not slots.will_be_written(memory))
    return slots.will_be_written(room) and pinned.page_locks.take(room, gpu)


def _as_torch(images: torch.Tensor, normalize: Normalize | None) -> torch.Tensor:
    import torch

    # A Map may have made channels-first floats, or something other than an image: those are unchanged. The permuted
    # tensor has channels-last memory, with the same bytes.
    if images.ndim == 4 and images.shape[3] == 3 and images.dtype == torch.uint8:
        images = images.permute(0, 3, 1, 2)
    return images if normalize is None else normalize.apply_torch(images)


# ---- fields whose values differ in length ----

Collate: TypeAlias = Literal["list", "pad", "packed"]
"""Forms of a field whose values differ in length.

"list": one array per sample. "pad": one zero-padded array and ``NAME_length``. "packed": all values end to end and
``NAME_bounds``. A field that differs in several lengths gets ``NAME_size``, instead of its length or in addition to its
bounds.
"""

_BESIDE: dict[str, tuple[str, ...]] = {"pad": ("length",), "packed": ("bounds",)}
"""Suffixes of the keys added for a field that differs in its first length."""

_BESIDE_SIZED: dict[str, tuple[str, ...]] = {"pad": ("size",), "packed": ("bounds", "size")}
"""Suffixes of the keys added for a field that differs in several lengths."""


def check_names(spec: SampleSpec, how: Collate) -> None:
    """Raise ConfigError if a key added for a field is the name of another field."""
    names = {field.name for field in spec.fields}
    for field in spec.fields:
        for name in names.intersection(_beside(field, how)):
            raise ConfigError(f"collate={how!r} adds {name!r} to a minibatch, which is a field of this feed already")


def _beside(field: Field, how: Collate) -> list[str]:
    """Return the keys added for a field."""
    suffixes = (_BESIDE_SIZED if field.differing > 1 else _BESIDE).get(how, ()) if field.is_packed else ()
    return [f"{field.name}_{each}" for each in suffixes]


def collating(converter: Converter, spec: SampleSpec, how: Collate, *, has_images: bool = True) -> Converter:
    """Return a converter that also accepts `Packed` values, if samples have any."""
    if not any(field.is_packed for field in spec.fields):
        return converter
    return _Collating(converter, how, IMAGE if has_images else None)


class _Sized(Struct, frozen=True):
    """Pending steps for a field that differs in several lengths, to be done after its conversion."""

    shapes: list[list[int]]  # the first lengths of each sample
    tail: tuple[int, ...]  # the lengths shared by all samples
    is_image: bool  # converted as an image one pixel wide, so that it is normalized

    @classmethod
    def of(cls, column: Packed, *, may_be_image: bool) -> _Sized:
        assert column.shapes is not None
        tail = column.values.shape[1:]
        is_image = (column.dtype.name, column.shapes.shape[1], tail) == ("uint8", 2, (3,))
        return cls(column.shapes.tolist(), tail, is_image and may_be_image)

    def finish(self, values: Any, how: Collate) -> Any:
        """Return the collated field. In torch, lists and padded arrays of images are channels-first."""
        as_torch = self.is_image and not isinstance(values, np.ndarray)
        if self.is_image:  # [1, 3, total, 1] in torch, [1, total, 1, 3] in NumPy: the same memory
            values = (values.permute(0, 2, 3, 1) if as_torch else values).reshape(-1, 3)
        if how == "packed":
            return values
        lengths = [prod(shape) for shape in self.shapes]
        pieces = zip(_cut(values, lengths), self.shapes, strict=True)
        cut = [piece.reshape(*shape, *self.tail) for piece, shape in pieces]
        if how == "list":
            return [each.permute(2, 0, 1) for each in cut] if as_torch else cut
        padded = self._padded(values, cut)
        return padded.permute(0, 3, 1, 2) if as_torch else padded

    def _padded(self, values: Any, cut: list[Any]) -> Any:
        most = [max(lengths) for lengths in zip(*self.shapes, strict=True)]
        shape = (len(cut), *most, *self.tail)
        out = np.zeros(shape, values.dtype) if isinstance(values, np.ndarray) else values.new_zeros(shape)
        for row, (each, lengths) in enumerate(zip(cut, self.shapes, strict=True)):
            corner: tuple[int | slice, ...] = (row, *(slice(length) for length in lengths))
            out[corner] = each
        # NumPy arrays are read-only even if a minibatch does not share them.
        return read_only(out) if isinstance(out, np.ndarray) else out


class _Started(Struct, frozen=True):
    inner: Any
    lengths: dict[str, list[int]]
    sized: dict[str, _Sized]


class _Collating:
    def __init__(self, converter: Converter, how: Collate, image: str | None) -> None:
        self._converter, self._how, self._image = converter, how, image
        self.ahead = converter.ahead

    def start(self, arrays: Arrays) -> _Started:
        plain: Arrays = {}
        lengths: dict[str, list[int]] = {}
        sized: dict[str, _Sized] = {}
        for name, column in arrays.items():
            if not isinstance(column, Packed):
                plain[name] = column
            elif column.shapes is None and self._how == "pad":
                plain |= {name: column.padded(), f"{name}_length": column.lengths}
            else:
                plain[name], bounds = column.own()
                if self._how == "packed":
                    plain[f"{name}_bounds"] = bounds
                if column.shapes is None:
                    lengths |= {name: column.lengths.tolist()} if self._how == "list" else {}
                    continue
                sized[name] = _Sized.of(column, may_be_image=name == self._image)
                if sized[name].is_image:
                    plain[name] = plain[name][None, :, None]
                if self._how != "list":
                    plain[f"{name}_size"] = column.shapes
        return _Started(self._converter.start(plain), lengths, sized)

    def finish(self, started: _Started) -> Minibatch:
        batch = self._converter.finish(started.inner)
        for name, own in started.lengths.items():
            batch[name] = _cut(batch[name], own)
        for name, sized in started.sized.items():
            batch[name] = sized.finish(batch[name], self._how)
        return batch


def _cut(values: Any, lengths: list[int]) -> list[Any]:
    pieces, start = [], 0
    for length in lengths:
        pieces.append(values[start : start + length])
        start += length
    return pieces


def check_columns(columns: Mapping[str, str], spec: SampleSpec, how: Collate) -> None:
    """Raise ConfigError if ``columns`` name a field that minibatches do not have."""
    there = list(dict.fromkeys(name for field in spec.fields for name in (field.name, *_beside(field, how))))
    for new, name in columns.items():
        if name not in there:
            has = ", ".join(map(repr, there))
            raise ConfigError(f"columns[{new!r}] must be a field of minibatches, {has}, got {name!r}", option="columns")
