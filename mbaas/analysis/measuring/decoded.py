"""Samples in memory as caches keep them decoded, so that it can be measured how fast they are prepared."""

from __future__ import annotations

import numpy as np

from mbaas.analysis.measuring.prep import BLOCK_SAMPLES, SUBSET_BYTES, Raw, made_of
from mbaas.messages import EngineName
from mbaas.prep.decoded import KeptRows
from mbaas.prep.engines import make_engine
from mbaas.transforms import Pipeline


def decoded(
    raw: Raw, pipeline: Pipeline, *, engine: EngineName = "cpu", seed: int = 0, most_bytes: int = SUBSET_BYTES
) -> Raw | None:
    """Decode samples, up to the first transform of the pipeline that may make something else in each epoch.

    Args:
        raw: the samples, of which those are left out that cannot be prepared.
        pipeline: what prepares them.
        engine: that goes on with them: each goes on with its own only. Here it decodes on the CPU.
        seed: of the pipeline's draws, on which decoded samples do not depend.
        most_bytes: of the decoded samples together; the first ones that fit are taken.

    Returns:
        The same samples, with their decoded form in place of their bytes; None if none can be kept decoded.

    Raises:
        BadSampleError: names the first sample, if none can be prepared.
    """
    out, encoded = made_of(raw, pipeline, seed).empty(BLOCK_SAMPLES), raw.rows()
    decoding = make_engine(engine, pipeline, seed=seed)
    kept, lengths, parts, left = [], [], [], most_bytes
    try:
        for start in range(0, len(encoded), BLOCK_SAMPLES):
            block = slice(start, min(start + BLOCK_SAMPLES, len(encoded)))
            keep = KeptRows(range(block.stop - start), left)
            known = {name: column[block] for name, column in raw.known.items()}
            decoding.prepare(encoded[block], raw.sample_ids[block], 0, known, out[: block.stop - start], keep)
            rows, sizes, packed = keep.taken()
            kept.append(start + rows)
            lengths.append(sizes)
            parts.append(packed)
            left -= len(packed)
            if not len(rows):  # none can be kept, or there is no room any more
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
