"""What identifies a function: its name, code, constants, defaults and closure, as bytes to hash."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from mbaas.errors import ConfigError


def name_of(fn: object) -> str:
    """Qualified name of a function, or of a callable object's class."""
    if isinstance(fn, functools.partial):
        return f"partial of {name_of(fn.func)}"
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(named, '__module__', None) or 'builtins'}.{getattr(named, '__qualname__', repr(named))}"


def pickled(value: object) -> bytes:
    """``value`` as Ray pickles it; raises what the pickler raises."""
    from ray import cloudpickle  # here: to import Ray takes a second, and most pipelines hold no function

    dumps: Callable[[object], bytes] = cloudpickle.dumps
    return dumps(value)


def digest_of(value: object) -> str:
    """32 hex digits that identify ``value`` by its content, equal in all runs of one Python version."""
    try:
        return _bytes_of(value).hex()
    except RecursionError as error:
        raise ConfigError(f"{name_of(value)} refers to itself: its content cannot be identified") from error


def _feed(digest: hashlib.blake2b, value: object) -> None:
    """Add ``value`` to ``digest`` so that equal values of different runs add the same bytes."""
    digest.update(f"<{type(value).__qualname__}>".encode())
    for part in _parts(value):
        if isinstance(part, bytes):
            # With its length before it: else "ab", "c" and "a", "bc" would be the same.
            digest.update(len(part).to_bytes(8, "little") + part)
        else:
            _feed(digest, part)


def _parts(value: Any) -> list[Any]:
    """What ``value`` consists of: bytes, and values to take apart further."""
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


def _parts_of_code(value: Any) -> list[Any]:
    if isinstance(value, CodeType):
        return [value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_freevars]
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        others = [item for item in held if item is not value]  # a recursive function holds itself
        return [name_of(value).encode(), value.__code__, value.__defaults__, value.__kwdefaults__, others]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return [name_of(value).encode() if hasattr(value, "__qualname__") else pickled(value)]
    call = type(value).__call__ if callable(value) else None
    return [name_of(value).encode(), call if isinstance(call, FunctionType) else None, vars(value)]


def _bytes_of(value: object) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, value)
    return digest.digest()
