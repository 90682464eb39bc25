"""Messages between consumers and coordinators come through as they are, and invalid ones are recognised."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

import mbaas
from mbaas import errors
from mbaas.calls import encoding
from mbaas.errors import BadSampleError, ConfigError, MbaasError, PrepFailedError, StorageError
from mbaas.memory.part_memory import CountedObject, PartAddress, StoredObject
from mbaas.memory.slots import Slot, SlotColumn
from mbaas.ray_cluster.references import OBJECT_ID_BYTES
from mbaas.samples.order import Shuffle
from mbaas.samples.placement import BlockPart
from mbaas.wire.blocks import DeliveredBlock, DeliveredPart, PartMeta, UnreadablePart
from mbaas.wire.consumers import Ask, BlockCall, Delivery, SocketAnswer, SocketCall
from mbaas.wire.samples import BadSample

ROOT = Path(mbaas.__file__).parent

SLOT = Slot("/proc/1/fd/3", b"t" * 16, 1, 4096, 80, 2, (SlotColumn("image", 0, "uint8", (8, 10)),), ("boxes",))
BAD = BadSample(3, "/data/3.jpg", "not an image")


STORED = StoredObject(b"i" * OBJECT_ID_BYTES, b"owner", b"status")


def block(address: PartAddress | None = None, error: MbaasError | None = None) -> DeliveredBlock:
    meta = PartMeta(8, (BAD,), 0.1, 0.2, 80)
    parts = () if address is None else (DeliveredPart(meta, address, 0, 1, "n0", BlockPart("n0", 1)),)
    return DeliveredBlock(5, Shuffle(2, (64,), Shuffle(1)), parts, error, is_new=True)


ANSWER = SocketAnswer(
    7, Delivery((block(SLOT), block(STORED), block()), 0.5, as_copy=True, waits_for="block 5", progress=9)
)


def test_an_answer_comes_through_as_it_is() -> None:
    assert encoding.decode_answer(encoding.encode_answer(ANSWER)) == ANSWER
    assert encoding.decode_answer(encoding.encode_answer(SocketAnswer(0))) == SocketAnswer(0)


# ---- errors ----

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MbaasError)]

ERRORS = [
    *(
        kind("a reason")
        for kind in vars(errors).values()
        if isinstance(kind, type) and kind.__init__ is Exception.__init__
    ),
    ConfigError("a value must be less", option="staging_bytes"),
    BadSampleError("/data/3.jpg", "not an image"),
    BadSampleError("a\nb", "not an image"),
    StorageError("s3://bucket/3.jpg", "no answer", is_missing=True),
    errors.WaitTimeoutError("too late"),
]


def as_is(error: MbaasError) -> tuple[Any, ...]:
    return type(error), error.args, str(error), vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_the_class_that_was_raised_with_its_message_and_attributes(error: MbaasError) -> None:
    """In all three positions of an answer; and as Ray would bring it."""
    sent = SocketAnswer(1, Delivery((block(error=error),), error=error), error)
    found = encoding.decode_answer(encoding.encode_answer(sent))
    assert found.delivery is not None
    for came in (found.error, found.delivery.error, found.delivery.blocks[0].error):
        assert came is not None
        assert as_is(came) == as_is(error) == as_is(pickle.loads(pickle.dumps(came)))


def test_every_error_can_cross() -> None:
    assert {type(error) for error in ERRORS} == set(KINDS)


class OfAnotherVersionError(PrepFailedError):
    """A subclass that the receiver does not have."""


def test_an_error_of_another_version_arrives_as_its_nearest_known_class() -> None:
    found = encoding.decode_answer(
        encoding.encode_answer(SocketAnswer(1, error=OfAnotherVersionError("three workers died")))
    )
    assert found.error is not None
    assert as_is(found.error) == (PrepFailedError, ("three workers died",), "three workers died", {})


@pytest.mark.parametrize("kind", ["NewError", "", "ValueError", "SystemExit", "__class__", "shown"])
def test_an_unknown_kind_of_error_is_an_mbaas_error(kind: str) -> None:
    found = encoding.decode_answer(msgspec.msgpack.encode([1, None, [kind, "a reason", {"__class__": "x", "left": 3}]]))
    assert type(found.error) is MbaasError
    assert str(found.error) == "a reason"


# ---- invalid messages ----


def plain(value: Any) -> Any:
    return msgspec.msgpack.decode(encoding.encode_answer(value))


def answer_with(path: tuple[int, ...], value: Any) -> bytes:
    """Return `ANSWER` as a peer would send it that replaced one value."""
    changed = plain(ANSWER)
    inner = changed
    for index in path[:-1]:
        inner = inner[index]
    inner[path[-1]] = value
    return msgspec.msgpack.encode(changed)


DELIVERY, BLOCK, PART = (1,), (1, 0, 0), (1, 0, 0, 2, 0)
META, SHUFFLE, ADDRESS = (*PART, 0), (*BLOCK, 1), (*PART, 1)

WRONG: list[tuple[tuple[int, ...], Any]] = [
    ((0,), -1),
    ((0,), "7"),
    (DELIVERY, 17),
    ((2,), "an error"),
    ((2,), ["MbaasError", 7]),
    ((2,), ["MbaasError", "a reason", {"left": [1]}]),
    ((*DELIVERY, 0), {"blocks": 1}),
    ((*DELIVERY, 1), -0.5),
    ((*DELIVERY, 1), float("nan")),
    ((*DELIVERY, 2), 1),
    ((*DELIVERY, 3), b"bytes"),
    ((*DELIVERY, 4), 2.5),
    ((*DELIVERY, 7), 7),
    ((*BLOCK, 0), 2**62 + 1),
    ((*BLOCK, 2), None),
    ((*BLOCK, 4), "yes"),
    ((*SHUFFLE, 0), -1),
    ((*SHUFFLE, 1), [5, 3]),
    ((*SHUFFLE, 2), None),
    ((*META, 0), -1),
    ((*META, 1), [{"sample_id": 1}]),
    ((*META, 2), float("inf")),
    (ADDRESS, None),
    (ADDRESS, [plain(SLOT)]),
    (ADDRESS, ["Unknown", b"id"]),
    (ADDRESS, ["StoredObject", b"i" * (OBJECT_ID_BYTES - 1), b"", b""]),
    (ADDRESS, ["StoredObject", b"i" * (OBJECT_ID_BYTES + 1), b"", b""]),
    (ADDRESS, ["CountedObject", b"i" * OBJECT_ID_BYTES]),
    (ADDRESS, b"a reference"),
    ((*ADDRESS, 3), -1),
    ((*PART, 3), -2),
    ((*PART, 5), ["n0"]),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=str)
def test_an_answer_with_a_wrong_value_is_invalid(path: tuple[int, ...], value: Any) -> None:
    with pytest.raises(encoding.INVALID):
        encoding.decode_answer(answer_with(path, value))


def test_an_answer_that_ends_early_is_invalid() -> None:
    whole = encoding.encode_answer(ANSWER)
    for length in range(len(whole)):
        with pytest.raises(encoding.INVALID):
            encoding.decode_answer(whole[:length])


def test_a_nesting_without_end_is_invalid() -> None:
    deep = b"\x91" * 100_000
    with pytest.raises(encoding.INVALID):
        encoding.decode_answer(b"\x92\x01" + deep)
    assert encoding.socket_call(b"\x92\x01" + deep) is None


def test_a_pickle_is_invalid() -> None:
    with pytest.raises(encoding.INVALID):
        encoding.decode_answer(pickle.dumps(ANSWER))


CALL = BlockCall(Ask("a", 1, 5, 3, 4), 0.5, (UnreadablePart(1, 2, 3),))


def test_a_call_that_ends_early_or_has_no_number_is_invalid() -> None:
    whole = encoding.encode(SocketCall(3, msgspec.Raw(encoding.encode(CALL))))
    sent = encoding.socket_call(whole)
    assert sent is not None
    assert (sent.number, encoding.decoded(sent.call, BlockCall)) == (3, CALL)
    assert [encoding.socket_call(whole[:length]) for length in range(len(whole))] == [None] * len(whole)
    for number in (-1, 2.5, "3", None, True):
        assert encoding.socket_call(msgspec.msgpack.encode([number, 0])) is None


def test_a_call_with_a_wrong_value_tells_its_caller() -> None:
    """It has a number, so it has an answer."""
    sent = encoding.socket_call(msgspec.msgpack.encode([3, {"ask": {"consumer": 7}}]))
    assert sent is not None
    with pytest.raises(ConfigError, match=r"ask.consumer must be `str`, got 7"):
        encoding.decoded(sent.call, BlockCall)


# ---- answers that are sent through Ray instead ----


@pytest.mark.parametrize(
    ("delivery", "why"),
    [
        (Delivery((block(CountedObject(ray.ObjectRef.from_random())),)), "a reference that Ray counts"),
        (Delivery(waits_for="\udcff.jpg"), "the name of a file that is not text"),
    ],
)
def test_what_cannot_be_sent_without_ray_is_asked_through_it(delivery: Delivery, why: str) -> None:
    """Some versions of Ray cannot send a reference uncounted."""
    assert encoding.decode_answer(encoding.encode_answer(SocketAnswer(7, delivery))) == SocketAnswer(7), why


@pytest.mark.meets_bugs
def test_an_answer_that_is_a_bug_is_logged_and_asked_through_ray(caplog: pytest.LogCaptureFixture) -> None:
    answer = SocketAnswer(7, Delivery(progress=object()))  # type: ignore[arg-type]
    assert encoding.decode_answer(encoding.encode_answer(answer)) == SocketAnswer(7)
    assert "while an answer was encoded" in caplog.text


# ---- no pickle ----

RECEIVING = [path for room in ("calls", "client", "wire") for path in sorted((ROOT / room).glob("*.py"))]
"""Modules that make calls or use received answers."""

UNPICKLERS = {"pickle", "cloudpickle", "_pickle", "dill", "marshal", "shelve"}


def unpicklers(source: str) -> set[str]:
    words = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            words |= {part for alias in node.names for part in alias.name.split(".")}
            words |= set((getattr(node, "module", None) or "").split("."))
    return words & UNPICKLERS


@pytest.mark.parametrize("path", RECEIVING, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_arrives_is_unpickled(path: Path) -> None:
    assert unpicklers(path.read_text()) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import ray\nray.cloudpickle.loads(x)",
        "from ray import cloudpickle",
    ],
)
def test_an_unpickler_is_noticed(source: str) -> None:
    assert unpicklers(source)
