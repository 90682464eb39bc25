"""Encoding of calls and their answers as msgpack, with types and bounds checked by decoding.

An answer over a socket contains object references that Ray does not count. The owner of an object tracks every process
that was sent a counted reference: it subscribes to each, and each reports when its last reference is dropped. For a
block sent to a trial, this is more than half of the cost on both sides (docs/scaling.md, "CPU time of delivery"). It is
also redundant: consumers report released blocks, and coordinators keep their references until then.

Memory that a process has mapped stays readable until the process unmaps it, whether or not references are counted. If
the owner drops its reference earlier, because it removed the consumer, a read raises `ray.exceptions.ObjectLostError`
at once, as for any lost object.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

import msgspec
import ray

from mbaas import bugs, errors
from mbaas.errors import ConfigError, MbaasError, shown
from mbaas.messages import Delivery, SentError, SocketAnswer, SocketCall, StoreRef

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
    """Return an encoded call of a consumer.

    Raises:
        ConfigError: it is invalid. The message contains the field, its value and the allowed values.
    """
    of_kind: Any = kind
    try:
        found: MessageT = _decoder(of_kind).decode(call)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(str(error), kind.__name__, call)) from None
    except (*INVALID, TypeError) as error:
        raise ConfigError(f"a call must be a {kind.__name__} in msgpack, got {shown(call)}: {error}") from None
    return found


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
        found: SocketCall = _decoder(SocketCall).decode(message)
    except INVALID:
        return None
    return found


# ---- answers ----

HANG_UP = b""
"""A coordinator's answer to an invalid message: its sender is disconnected."""


class _CountedError(Exception):
    """A reference that Ray must count, and which therefore cannot be sent without Ray."""


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
    """Return an answer with references that this process can read.

    Raises:
        INVALID: the message is invalid.
    """
    answer = _ANSWERS.decode(message)
    if answer.delivery is not None:
        receive_refs(answer.delivery)
    return answer


# ---- references to objects ----


def uncounted(ref: ray.ObjectRef[Any]) -> Any:
    """Return a reference as a `StoreRef`, or as it is if this version of Ray cannot do that.

    Args:
        ref: of an object that this process keeps for as long as the receiver may begin to read it.
    """
    # Not public: Ray pickles its references in the same way, and also records them as part of a value.
    worker: Any = ray._private.worker.global_worker
    try:
        _, owner, status = worker.core_worker.serialize_object_ref(ref)
    except (AttributeError, TypeError, ValueError):
        return ref
    return StoreRef(ref.binary(), owner, status)


def receive_refs(delivery: Delivery) -> None:
    """Turn each `StoreRef` of a delivery into an ordinary reference of this process."""
    for block in delivery.blocks:
        for part in block.parts:
            refs: list[Any] = part.refs
            refs[:] = [received(ref) if isinstance(ref, StoreRef) else ref for ref in refs]


def received(sent: StoreRef) -> Any:
    """Return an ordinary reference to an object."""
    of_ray: Any = ray
    ref = of_ray.ObjectRef(sent.id, sent.owner)  # first, so that this process counts at least one reference
    worker = of_ray._private.worker.global_worker
    worker.core_worker.deserialize_and_register_object_ref(sent.id, of_ray.ObjectRef.nil(), sent.owner, sent.status)
    return ref
