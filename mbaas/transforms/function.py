"""A user's own function as a transform, and what identifies a function: its name, code, constants and closure."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from mbaas.errors import ConfigError
from mbaas.fields import Field
from mbaas.transforms import checks
from mbaas.transforms.base import Transform

SampleFunction = Callable[..., Any]
"""fn(sample, rng), or fn(sample) if it is deterministic."""


@dataclass(frozen=True)
class Map(Transform):
    """Apply ``fn`` to the sample: ``fn(image, rng) -> array``.

    ``image`` is uint8 [height, width, 3] and belongs to ``fn``, which may change it; ``rng`` is a
    ``numpy.random.Generator`` of this sample, epoch and place in the pipeline, the only randomness ``fn`` may
    use. The result may have any shape and dtype, but the same for all samples; image transforms after it need
    uint8 [height, width, 3]. A result of another kind reaches the trial as ``fn`` made it: only uint8 [height, width,
    3] becomes channels-first as torch. Runs on the cpu engine.

    Where boxes or key points lie on the image, transforms before and after a Map move them; to the function itself they
    belong only if it names them in ``fields``. It then gets them in pixels of the image that it gets, with what goes
    beside boxes if it names that, too, and returns them in pixels of the image that it returns, whatever its size.

    In a pipeline of sound or arrays ``fn`` gets what the transform before it makes. Its results may differ in their
    first length where that may differ, and transforms after it need what they need of any sample.

    With ``fields`` the function takes and returns a dict instead: ``fn(sample, rng) -> sample``. It has the sample
    under the name that the pipeline's decoder gives it, such as "image", and these fields of the dataset as NumPy
    arrays, those of numbers with shape (). What the returned dict leaves out stays as it was. A field keeps its dtype
    and its shape; a list of varying length may become shorter, and with ``longest`` also longer.

    A function that needs no chance is best said to be ``deterministic``: it is then called without the generator,
    ``fn(image)`` or ``fn(sample)``, and makes the same of a sample in every epoch. So its results may be kept instead
    of being made again, and epochs of a pipeline without any chance are the same.

    Args:
        fn: a function that pickles (by cloudpickle) and depends on nothing but its arguments.
        fields: names of the dataset's fields that ``fn`` takes and may change.
        longest: how long ``fn`` may make lists of varying length among these. By default it may make none longer than
            it was: memory is granted for the longest that the dataset has.
        deterministic: whether ``fn`` takes the sample alone and always makes the same of it.
    """

    fn: SampleFunction
    fields: tuple[str, ...] = ()
    longest: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        names: object = self.fields  # as an object: type checkers take the checks below for needless
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"Map's fields must be a list of names, such as ['label'], got {names!r}", option="fields"
            )
        object.__setattr__(self, "fields", tuple(self.fields))
        if self.longest is not None:
            self._set("longest", checks.whole("Map's longest", self.longest, least=1, most=2**40))
            if not self.fields:
                raise ConfigError(
                    f"Map's longest is for lists among its fields, of which it has none, got {self.longest}",
                    option="longest",
                )
        if not isinstance(self.deterministic, bool):
            raise checks.refused("Map's deterministic", "must be true or false", self.deterministic)
        if not callable(self.fn):
            raise ConfigError(f"Map's fn must be a function fn(image, rng), got {self.fn!r}", option="fn")
        if self.deterministic:
            _check_takes_one(self.fn)
        # Tried here, where the user can see which line it was, and not when the first worker starts. A pickler runs
        # code of the user's objects, which may raise anything.
        try:
            _pickled(self.fn)
        except Exception as error:
            message = f"Map's fn must pickle to reach the prep workers, but {name_of(self.fn)} does not: {error}"
            raise ConfigError(message, option="fn") from error

    def __repr__(self) -> str:
        return f"Map({name_of(self.fn)}{self._options})"

    @property
    def _options(self) -> str:
        """What is given beside the function: nothing where it is left out, as fingerprints of saved states have it."""
        longest = "" if self.longest is None else f", longest={self.longest}"
        fields = f", fields={list(self.fields)!r}{longest}" if self.fields else ""
        return f"{fields}, deterministic=True" if self.deterministic else fields

    def made(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Return the fields of a sample after it: lists may be longer.

        Raises:
            ConfigError: ``longest`` is given, and no field that it takes is a list of varying length.
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
        """Return the name of the function, and a hash of its code, constants, defaults and closure.

        Stable between processes and runs of one Python version: bytecode differs between versions. Global
        names that the function reads are not followed: a changed helper function or module constant goes
        unnoticed.
        """
        return f"Map({name_of(self.fn)}, {_digest_of(self.fn)}{self._options})"


def name_of(fn: object) -> str:
    """Return the qualified name of a function, or of a callable object's class."""
    if isinstance(fn, functools.partial):
        return f"partial of {name_of(fn.func)}"
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    # Some builtins have no module.
    return f"{getattr(named, '__module__', None) or 'builtins'}.{getattr(named, '__qualname__', repr(named))}"


def _check_takes_one(fn: SampleFunction) -> None:
    """Check that a deterministic function can be called with a sample alone.

    Raises:
        ConfigError: it needs more, or takes nothing.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins have none that Python knows
        return
    try:
        signature.bind(object())
    except TypeError as error:
        raise ConfigError(
            f"a deterministic Map calls fn(image), without a generator, but {name_of(fn)} takes {signature}",
            option="fn",
        ) from error


def _pickled(value: object) -> bytes:
    """Pickle ``value`` as Ray does, and raise what the pickler raises."""
    from ray import cloudpickle  # here: to import Ray takes a second, and most pipelines hold no function

    dumps: Callable[[object], bytes] = cloudpickle.dumps
    return dumps(value)


def _digest_of(value: object) -> str:
    """Return 32 hex digits that identify ``value`` by its content, equal in all runs of one Python version."""
    try:
        return _bytes_of(value).hex()
    except RecursionError as error:
        raise ConfigError(f"{name_of(value)} refers to itself: its content cannot be identified") from error


def _bytes_of(value: object) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, value)
    return digest.digest()


def _feed(digest: hashlib.blake2b, value: object) -> None:
    """Add ``value`` to ``digest`` so that equal values of different runs add the same bytes."""
    # The type comes first, or a list and a tuple of the same items would be the same.
    digest.update(f"<{type(value).__qualname__}>".encode())
    for part in _parts(value):
        if isinstance(part, bytes):
            # With its length before it: else "ab", "c" and "a", "bc" would be the same.
            digest.update(len(part).to_bytes(8, "little") + part)
        else:
            _feed(digest, part)


def _parts(value: Any) -> list[Any]:
    """List what ``value`` consists of: bytes, and values to take apart further."""
    if isinstance(value, bytes):
        return [value]
    if value is None or isinstance(value, (bool, int, float, complex, str, type(...), range, slice)):
        return [repr(value).encode()]
    if isinstance(value, (tuple, list)):
        return [str(len(value)).encode(), *value]
    if isinstance(value, (dict, set, frozenset)):
        # By their digests: the order of a set differs from process to process.
        return sorted(_bytes_of(item) for item in (value.items() if isinstance(value, dict) else value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [value.dtype.str.encode(), repr(value.shape).encode(), value.tobytes()]
    return _parts_of_code(value)


def _content_of(cell: CellType, name: str, function: FunctionType) -> object:
    try:
        return cell.cell_contents
    except ValueError as error:  # the name is assigned only after the function was defined, or was deleted
        message = f"{name_of(function)} uses {name!r} of the function around it, which has no value yet"
        raise ConfigError(message) from error


def _parts_of_code(value: Any) -> list[Any]:
    if isinstance(value, CodeType):
        # Without file and line numbers: a function that only moved is the same function.
        return [value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_freevars]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        held = [_content_of(cell, name, value) for name, cell in cells]
        others = [item for item in held if item is not value]  # a recursive function holds itself
        return [name_of(value).encode(), value.__code__, value.__defaults__, value.__kwdefaults__, others]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        # A class or a builtin goes by its name; of anything else written in C only a pickle shows the content.
        return [name_of(value).encode() if hasattr(value, "__qualname__") else _pickled(value)]
    call = type(value).__call__ if callable(value) else None
    return [name_of(value).encode(), call if isinstance(call, FunctionType) else None, vars(value)]
