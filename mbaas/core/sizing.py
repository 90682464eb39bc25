"""How many samples make a block.

Large blocks make Ray's cost per delivery small (about 4 ms of CPU for coordinator, trial and daemons together); small
blocks let all workers take part and bring the first minibatch early. The content of minibatches does not depend on it.
"""

from __future__ import annotations

import math

from mbaas.errors import ConfigError

TARGET_BYTES = 128 * 2**20
"""At 150 kB a sample these are 890 samples: a core prepares them in about a second, 8 trials take them in 32 ms."""

TARGET_S = 2.0
"""A block should not take a worker longer than this."""

SHARE_OF_BUDGET = 8
"""At least so many blocks fit the staging budget, if minibatches are small enough."""

LANE_SHARE = 4
"""At least so many fit a lane's part of the budget: two that a consumer holds which stands still, two for others."""

MIN_BLOCKS_STAGED = 3
"""One that consumers read, one that is ready, one that is made."""


def block_samples(
    *,
    num_samples: int,
    batch_size: int,
    sample_bytes: int,
    staging_bytes: int,
    workers: int,
    sample_s: float,
    nodes: int = 1,
    lanes: int = 1,
) -> int:
    """Samples in a block: whole minibatches, as many as all bounds allow, at least one.

    Args:
        num_samples: samples in an epoch.
        batch_size: samples in the feed's minibatch.
        sample_bytes: bytes of one prepared sample.
        staging_bytes: the staging budget.
        workers: prep workers on a node; each should have its part of a block of a small epoch.
        sample_s: seconds that one worker needs for one sample.
        nodes: each makes a part of the block.
        lanes: each has its part of the budget, and must hold `MIN_BLOCKS_STAGED` blocks in it.

    Raises:
        ConfigError: the budget does not hold `MIN_BLOCKS_STAGED` minibatches.

    Example:
        64 samples of 150,528 bytes are 9.6 MB; 128 MiB hold 13 such minibatches, so a block has 832 samples.
    """
    batch_bytes = min(batch_size, num_samples) * sample_bytes
    least = MIN_BLOCKS_STAGED * lanes
    if staging_bytes < least * batch_bytes:
        in_lanes = f" in {lanes} lanes" if lanes > 1 else ""
        raise ConfigError(
            f"staging_bytes must hold at least {least} minibatches of {batch_size} samples{in_lanes} "
            f"({least * batch_bytes / 1e6:.1f} MB), got {staging_bytes / 1e6:.1f} MB"
        )
    most = min(
        nodes * TARGET_BYTES / sample_bytes,
        staging_bytes / max(SHARE_OF_BUDGET, LANE_SHARE * lanes) / sample_bytes,
        math.ceil(num_samples / workers),
        nodes * TARGET_S / max(sample_s, 1e-9),
    )
    return batch_size * max(1, int(most // batch_size))
