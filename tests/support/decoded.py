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
        The kept containers, after as many transforms as possible: row -> container.
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
        forms: dict[int, dict[int, NDArray[np.uint8]]] = {}
        for applied in engines[0].forms.values():
            keep = DecodedRows(range(count), _ROOM_BYTES, applied=applied)
            check_same(prepared(engines[1], files, epochs[0], keep), wanted[epochs[0]], f"kept after {applied}")
            forms[applied] = containers(keep)
        deepest = {row: container.tobytes() for row, container in forms[max(forms)].items()}
        assert deepest == {row: container.tobytes() for row, container in kept.items()}
        before = {applied: {row: each.tobytes() for row, each in form.items()} for applied, form in forms.items()}
        chance = np.random.default_rng(5)
        for epoch in epochs:
            for engine, share in zip(engines, (1.0, 0.5), strict=True):
                given = chance.choice([*forms], count) * (chance.random(count) < share)  # 0: encoded
                samples = [forms.get(given[row], {}).get(row, files[row]) for row in range(count)]
                applied, rows = int(chance.choice([*forms])), np.flatnonzero(chance.random(count) < 0.7)
                some = DecodedRows(rows.tolist(), int(chance.integers(1 << 20)), applied=applied)
                check_same(prepared(engine, samples, epoch, some), wanted[epoch], f"epoch {epoch}, share {share}")
                for row, again in containers(some).items():
                    assert samples[row] is files[row] or given[row] < applied, "kept after fewer transforms"
                    # A sample that is valid only in some epochs may have been bad in the first.
                    assert again.tobytes() == before[applied].get(row, again.tobytes())
        after = {applied: {row: each.tobytes() for row, each in form.items()} for applied, form in forms.items()}
        assert after == before, "they are read-only"
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
