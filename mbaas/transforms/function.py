"""Map, a user's function as a transform, and the identity of functions: name, code, constants and closure."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType, MethodType
from typing import Annotated, Any

import numpy as np

from mbaas.errors import ConfigError
from mbaas.samples.fields import Field
from mbaas.transforms import checks
from mbaas.transforms.base import Transform

SampleFunction = Callable[..., Any]
"""fn(sample, rng), or fn(sample) if deterministic."""


@dataclass(frozen=True)
class Map(Transform):
    """Apply ``fn`` to the sample: ``fn(image, rng) -> array``.

    ``image`` is uint8 [height, width, 3], and ``fn`` may modify it. ``rng`` is a ``numpy.random.Generator`` for this
    sample, epoch and position in the pipeline. ``fn`` must not use other randomness. The result may have any shape and
    dtype, but the same for all samples. Later image transforms need uint8 [height, width, 3]. Only such results become
    channels-first in torch; others are delivered unchanged. Map runs on the cpu engine.

    Boxes and keypoints on the image are updated by the other transforms, but ``fn`` receives them only if it names them
    in ``fields``. They are then in pixels of the image passed to ``fn``, and must be returned in pixels of the returned
    image, whatever its size. Fields with one value per box are passed only if they are named, too.

    In audio and array pipelines, ``fn`` receives the output of the previous transform. Its results may differ in their
    first length if that input may. Later transforms impose their usual requirements.

    With ``fields``, the function takes and returns a dict: ``fn(sample, rng) -> sample``. The dict has the sample under
    the decoder's name for it, such as "image", and the named fields as NumPy arrays, with shape () for single numbers.
    Keys missing from the returned dict keep their values. A field keeps its dtype and shape. A list of varying length
    may become shorter and, with ``longest``, longer.

    If your function is deterministic, declare it as ``deterministic``. It is then called without a generator,
    ``fn(image)`` or ``fn(sample)``, and must return the same result in every epoch. So its results may be cached, and a
    pipeline without randomness makes equal epochs.

    Args:
        fn: a function that cloudpickle can pickle, and that depends only on its arguments.
        fields: names of the dataset's fields that ``fn`` takes and may change.
        longest: maximum length of lists that ``fn`` returns in these fields. By default no list may become longer,
            because memory is reserved for the longest list in the dataset.
        deterministic: whether ``fn`` takes only the sample and always returns the same result for it.
    """

    fn: SampleFunction
    fields: tuple[str, ...] = ()
    longest: Annotated[int | None, checks.whole] = None
    deterministic: Annotated[bool, checks.flag] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        names: object = self.fields  # an object, or type checkers would report the checks below as unnecessary
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise self._refused("fields", "must be a list of names, such as ['label']")
        self._set("fields", tuple(self.fields))
        if self.longest is not None and not self.fields:
            raise self._refused("longest", "is for lists among its fields, of which it has none")
        if not callable(self.fn):
            raise self._refused("fn", "must be a function fn(image, rng)")
        _check_arguments(self.fn, with_rng=not self.deterministic)
        check_pickles("Map's fn", self.fn)

    @property
    def dali_limit(self) -> str:
        return "runs no Map of images or spectrograms"

    @property
    def user_code(self) -> str:
        """Name of the function, for errors that it raises."""
        return name_of(self.fn)

    def __repr__(self) -> str:
        return f"Map({self.user_code}{self._options})"

    @property
    def _options(self) -> str:
        """Options other than the function, without defaults, to keep the fingerprints in saved states."""
        longest = "" if self.longest is None else f", longest={self.longest}"
        fields = f", fields={list(self.fields)!r}{longest}" if self.fields else ""
        return f"{fields}, deterministic=True" if self.deterministic else fields

    def made(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Return the fields of a sample after this transform: lists may be longer.

        Raises:
            ConfigError: ``longest`` is set, but none of its fields is a list of varying length.
        """
        if self.longest is None:
            return fields
        if not any(field.name in self.fields and field.is_packed for field in fields):
            has = ", ".join(field.text for field in fields if field.name in self.fields)
            raise ConfigError(f"{self!r} says how long lists may become, but none of its fields is one: {has}")
        return tuple(
            replace(field, longest=max(field.longest, self.longest))
            if field.name in self.fields and field.is_packed
            else field
            for field in fields
        )

    def identity(self) -> str:
        """Return the name of the function and a hash of its code, constants, defaults and closure.

        It is the same in all processes and runs of one Python version; other versions have other bytecode. Globals are
        not followed: a change of a helper function or module constant goes unnoticed.
        """
        return f"Map({self.user_code}, {digest_of(self.fn)}{self._options})"


def name_of(fn: object) -> str:
    """Return the qualified name of a function, or of a callable object's class."""
    if isinstance(fn, functools.partial):
        return f"partial of {name_of(fn.func)}"
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    # Some builtins have no module.
    return f"{getattr(named, '__module__', None) or 'builtins'}.{getattr(named, '__qualname__', repr(named))}"


def _check_arguments(fn: SampleFunction, *, with_rng: bool) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(*(object(),) * (1 + with_rng))
    except TypeError as error:
        called = (
            "Map calls fn(image, rng), and fn(image) if deterministic=True"
            if with_rng
            else "a deterministic Map calls fn(image), without a generator"
        )
        raise ConfigError(f"{called}, but {name_of(fn)} takes {signature}", option="fn") from error


def check_pickles(where: str, value: object) -> None:
    """Raise ConfigError at the user's line, instead of at the start of the first worker, if ``value`` cannot pickle."""
    try:
        pickled(value)
    except Exception as error:  # user objects may run code when pickled, and raise any exception
        message = f"{where} must pickle to reach the prep workers, but {name_of(value)} does not: {error}"
        raise ConfigError(message, option=where.partition("'s ")[2]) from error


def pickled(value: object) -> bytes:
    """Pickle a value, with functions and classes that exist only in the user's program."""
    from ray import cloudpickle  # here: importing Ray takes a second, and most pipelines have no function

    dumps: Callable[[object], bytes] = cloudpickle.dumps
    return dumps(value)


def digest_of(value: object) -> str:
    # The same in all runs of one Python version.
    try:
        return _bytes_of(value).hex()
    except RecursionError as error:
        raise ConfigError(f"{name_of(value)} refers to itself: its content cannot be identified") from error


def _bytes_of(value: object) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, value)
    return digest.digest()


def _feed(digest: hashlib.blake2b, value: object) -> None:
    # The type comes first to distinguish a list from a tuple of the same items.
    digest.update(f"<{type(value).__qualname__}>".encode())
    for part in _parts(value):
        if isinstance(part, bytes):
            # The length comes first to distinguish "ab", "c" from "a", "bc".
            digest.update(len(part).to_bytes(8, "little") + part)
        else:
            _feed(digest, part)


def _parts(value: Any) -> list[Any]:
    # Bytes are hashed, other values are decomposed further.
    if isinstance(value, bytes):
        return [value]
    if value is None or isinstance(value, (bool, int, float, complex, str, type(...), range, slice)):
        return [repr(value).encode()]
    if isinstance(value, (tuple, list)):
        return [str(len(value)).encode(), *value]
    if isinstance(value, (dict, set, frozenset)):
        # Sorted digests, because the order of a set differs between processes.
        return sorted(_bytes_of(item) for item in (value.items() if isinstance(value, dict) else value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [value.dtype.str.encode(), repr(value.shape).encode(), value.tobytes()]
    torch = sys.modules.get("torch")  # without importing it, which takes a second
    if torch is not None and isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # NumPy has no bfloat16
        return [str(value.dtype).encode(), repr(tuple(value.shape)).encode(), content.numpy().tobytes()]
    return _parts_of_code(value)


def _content_of(cell: CellType, name: str, function: FunctionType) -> object:
    try:
        return cell.cell_contents
    except ValueError as error:  # the variable is assigned after the function's definition, or was deleted
        message = f"{name_of(function)} uses {name!r} of the function around it, which has no value yet"
        raise ConfigError(message) from error


def _parts_of_code(value: Any) -> list[Any]:
    if isinstance(value, CodeType):
        # Without file and line numbers: a function that only moved is the same function.
        return [value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_freevars]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        held = [_content_of(cell, name, value) for name, cell in cells]
        others = [item for item in held if item is not value]  # a recursive function refers to itself
        return [name_of(value).encode(), value.__code__, value.__defaults__, value.__kwdefaults__, others]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        # Classes and builtins are identified by name. Other objects implemented in C only reveal their content when
        # pickled.
        return [name_of(value).encode() if hasattr(value, "__qualname__") else pickled(value)]
    call = type(value).__call__ if callable(value) else None
    return [name_of(value).encode(), call if isinstance(call, FunctionType) else None, _state_of(value)]


def _state_of(value: Any) -> Any:
    # Not all of an object's state is in its __dict__: a PIL image's pixels are in C, for instance.
    kind: Any = type(value)
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        reduced = value.__reduce_ex__(4)
        return reduced if isinstance(reduced, str) else [list(x) if isinstance(x, Iterator) else x for x in reduced]
    get_state = getattr(kind, "__getstate__", None)
    if get_state is not getattr(object, "__getstate__", None):  # object has it from Python 3.11 on
        return value.__getstate__()
    slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ()) if hasattr(value, name)]
    return [vars(value), {name: getattr(value, name) for name in slots}] if slots else vars(value)
