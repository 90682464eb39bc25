"""Prepares the same samples encoded, decoded and mixed, and checks that all results are identical."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mbaas.prep.decoded import DecodedRows
from mbaas.prep.engines import Batch, Encoded, Engine, Prepared
from mbaas.samples.fields import Arrays, Column, memory

_ROOM_BYTES = 1 << 28


def containers(keep: DecodedRows) -> dict[int, NDArray[np.uint8]]:
    """Read-only copies of the kept containers: row -> container."""
    rows, lengths, packed = keep.taken()
    ends = np.cumsum(lengths)
    found = {
        row: packed[end - length : end].copy()
        for row, length, end in zip(rows.tolist(), lengths.tolist(), ends.tolist(), strict=True)
    }
    for container in found.values():
        container.flags.writeable = False
    return found


def check_any_mix(
    make: Callable[[int], Engine],
    files: Sequence[bytes],
    known: Mapping[str, Column] | None = None,
    *,
    first: int = 0,
    epochs: Sequence[int] = (0, 1, 2),
) -> dict[int, NDArray[np.uint8]]:
    """Check that an engine's output does not depend on the form of its input, on samples kept, or on threads.

    Args:
        make: builds the engine for a number of threads.
        files: encoded samples.
        known: their fields.
        first: index of a sample that is certainly valid.
        epochs: epochs to prepare; decoded samples come from the first.

    Returns:
        The kept containers: row -> container.
    """
    engines, values = [make(1), make(3)], dict(known or {})
    count = len(files)
    ids = np.arange(count) * 7 + 3
    field = engines[0].field(files[first], "first", {name: each[first : first + 1] for name, each in values.items()})

    def prepared(engine: Engine, samples: Sequence[Encoded], epoch: int, keep: DecodedRows | None = None) -> Prepared:
        out = np.full_like(field.empty(count), 77)
        return engine.prepare(Batch(samples, ids, epoch, values), out, keep)

    try:
        wanted = {epoch: prepared(engines[0], files, epoch) for epoch in epochs}
        everything = DecodedRows(range(count), _ROOM_BYTES)
        check_same(prepared(engines[1], files, epochs[0], everything), wanted[epochs[0]], "all kept")
        kept = containers(everything)
        before = {row: container.tobytes() for row, container in kept.items()}
        chance = np.random.default_rng(5)
        for epoch in epochs:
            for engine, share in zip(engines, (1.0, 0.5), strict=True):
                is_decoded = chance.random(count) < share
                samples = [kept[row] if row in kept and is_decoded[row] else files[row] for row in range(count)]
                some = DecodedRows(np.flatnonzero(chance.random(count) < 0.7).tolist(), int(chance.integers(1 << 20)))
                check_same(prepared(engine, samples, epoch, some), wanted[epoch], f"epoch {epoch}, share {share}")
                for row, again in containers(some).items():
                    assert samples[row] is files[row], "decoded input is not kept again"
                    # A sample that is valid only in some epochs may have been bad in the first.
                    assert again.tobytes() == before.get(row, again.tobytes())
        assert {row: container.tobytes() for row, container in kept.items()} == before, "they are read-only"
    finally:
        for engine in engines:
            engine.close()
    return kept


def check_same(found: Prepared, wanted: Prepared, what: str) -> None:
    """Check that samples were prepared identically, bit for bit."""
    assert found.bad == wanted.bad, what
    assert list(found.known) == list(wanted.known), what
    _check_columns({"made": found.made, **found.known}, {"made": wanted.made, **wanted.known}, what)


def _check_columns(found: Arrays, wanted: Arrays, what: str) -> None:
    for name, column in wanted.items():
        assert type(found[name]) is type(column), (what, name)
        for one, other in zip(memory(found[name]), memory(column), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), (what, name)
            if one.tobytes() != other.tobytes():
                differs = [row for row in range(len(one)) if one[row].tobytes() != other[row].tobytes()]
                raise AssertionError(f"{what}: {name} differs at {differs[:8]}")
