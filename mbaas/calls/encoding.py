"""Encoding of calls and their answers as msgpack, with types and bounds checked by decoding."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

import msgspec
import ray

from mbaas import errors
from mbaas.errors import ConfigError, MbaasError, shown
from mbaas.ray_cluster import bugs
from mbaas.wire.consumers import SentError, SocketAnswer, SocketCall

MessageT = TypeVar("MessageT")

INVALID = (msgspec.MsgspecError, ValueError, RecursionError)
"""Raised when bytes of another process are not a valid message."""

_ERRORS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MbaasError)
}


# ---- calls ----

encode = msgspec.msgpack.Encoder().encode
"""Encode a call."""


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decoded(call: bytes | msgspec.Raw, kind: type[MessageT]) -> MessageT:
    """Return an encoded call. Raises `ConfigError` with the field, its value and the allowed ones if it is invalid."""
    of_kind: Any = kind
    try:
        return _decoder(of_kind).decode(call)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(str(error), kind.__name__, call)) from None
    except (*INVALID, TypeError) as error:
        raise ConfigError(f"a call must be a {kind.__name__} in msgpack, got {shown(call)}: {error}") from None


def _sentence(error: str, kind: str, call: bytes | msgspec.Raw) -> str:
    """Rephrase an error of msgspec, such as "Expected `int` >= 0 - at `$.ask.cursor`", and add the value."""
    problem, _, path = error.partition(" - at `$")
    field, value = path.strip("`.") or kind, shown(_value_at(path, call))
    expected = re.fullmatch(r"Expected (.+?)(, got .+)?", problem)
    if expected is not None:
        return f"{field} must be {expected[1]}, got {value}"
    # from a `__post_init__` of mbaas, or a missing field
    return problem if " must " in problem else f"{field} must be complete, got {value}: {problem}"


def _value_at(path: str, call: bytes | msgspec.Raw) -> Any:
    try:
        value = msgspec.msgpack.decode(call)
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            value = value[name or int(index)]
    except (*INVALID, LookupError, TypeError):  # also invalid after the value
        return call
    return value


def socket_call(message: bytes) -> SocketCall | None:
    """Return a message to a coordinator over a socket; None if it is invalid."""
    try:
        return _decoder(SocketCall).decode(message)
    except INVALID:
        return None


# ---- answers ----

HANG_UP = b""
"""A coordinator's answer to an invalid message: its sender is disconnected."""


class _CountedError(Exception):
    """A reference that Ray counts (`CountedObject`), and which therefore cannot be sent without Ray."""


def _plain(value: Any) -> SentError:
    if isinstance(value, MbaasError):
        kind = next(base for base in type(value).__mro__ if _ERRORS.get(base.__name__) is base)
        sent = SentError(kind.__name__, str(value))
        sent.fields.update((name, each) for name, each in vars(value).items() if isinstance(each, (str, int, float)))
        return sent
    if isinstance(value, ray.ObjectRef):
        raise _CountedError
    raise TypeError(f"a message cannot contain {shown(value)}")


def _error(_kind: type, plain: Any) -> MbaasError:
    sent = msgspec.convert(plain, SentError)
    kind = _ERRORS.get(sent.kind, MbaasError)
    error = kind.__new__(kind, sent.message)  # their constructors take other arguments than the message
    vars(error).update(sent.fields)
    return error


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_ANSWERS = msgspec.msgpack.Decoder(SocketAnswer, dec_hook=_error)


def encode_answer(answer: SocketAnswer) -> bytes:
    """Return an encoded answer. If it cannot be sent without Ray, it instructs the consumer to call through Ray."""
    try:
        return _ENCODER.encode(answer)
    except (_CountedError, UnicodeEncodeError):  # the latter: names of files that are not text
        pass
    except Exception as error:  # the consumer gets its answer through Ray
        bugs.log_bug(error, "while an answer was encoded")
    return _ENCODER.encode(SocketAnswer(answer.number))


def decode_answer(message: bytes) -> SocketAnswer:
    """Return an encoded answer. Raises `INVALID`."""
    return _ANSWERS.decode(message)
