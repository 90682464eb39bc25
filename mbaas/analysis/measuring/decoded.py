"""Decoded samples in memory, for measuring the prep rate from the decoded tier."""

from __future__ import annotations

import numpy as np

from mbaas.analysis.measuring.prep import BLOCK_SAMPLES, SUBSET_BYTES, Raw, made_of
from mbaas.messages import EngineName
from mbaas.prep.decoded import DecodedRows
from mbaas.prep.engines import make_engine
from mbaas.transforms import Pipeline


def decoded(
    raw: Raw, pipeline: Pipeline, *, engine: EngineName = "cpu", seed: int = 0, most_bytes: int = SUBSET_BYTES
) -> Raw | None:
    """Decode samples through the pipeline's deterministic prefix; return None if no sample can be cached decoded.

    Samples that cannot be prepared are left out.

    Args:
        engine: engine that continues with them; decoded samples are specific to an engine. Decoding runs on the CPU.
        seed: seed of random draws, which does not affect decoded samples.
        most_bytes: limit for all decoded samples; the first ones that fit are taken.

    Raises:
        BadSampleError: no sample can be prepared; names the first one.
    """
    out, encoded = made_of(raw, pipeline, seed).empty(BLOCK_SAMPLES), raw.rows()
    decoding = make_engine(engine, pipeline, seed=seed)
    kept, lengths, parts, left = [], [], [], most_bytes
    try:
        for start in range(0, len(encoded), BLOCK_SAMPLES):
            block = slice(start, min(start + BLOCK_SAMPLES, len(encoded)))
            keep = DecodedRows(range(block.stop - start), left)
            known = {name: column[block] for name, column in raw.known.items()}
            decoding.prepare(encoded[block], raw.sample_ids[block], 0, known, out[: block.stop - start], keep)
            rows, sizes, packed = keep.taken()
            kept.append(start + rows)
            lengths.append(sizes)
            parts.append(packed)
            left -= len(packed)
            if not len(rows):  # none can be cached, or the limit is reached
                break
    finally:
        decoding.close()
    rows = np.concatenate(kept)
    if not len(rows):
        return None
    return Raw(
        raw.sample_ids[rows],
        tuple(raw.uris[row] for row in rows.tolist()),
        np.concatenate(parts),
        np.cumsum(np.concatenate(lengths)),
        {name: column[rows] for name, column in raw.known.items()},
    )
