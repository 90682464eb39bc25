"""Sample order and random numbers as pure functions of (seed, epoch, position or sample id), without tables or state.

`Permutation` maps a position to a sample in O(1) memory. `Shuffle` defines the order of an epoch,
`SampleOrder` computes it and cuts the epoch into blocks. `uniforms` and `generator` give each sample its random
numbers, and `id_hash` shows whether an epoch held each sample once.

The permutation is the generalised Feistel cipher with cycle walking of Black and Rogaway, "Ciphers with Arbitrary
Finite Domains" (CT-RSA 2002). The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Neither is
cryptographically secure: they are even, fast, and the same on every machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from mbaas.errors import ConfigError

Ids = NDArray[np.int64]
"""Positions or sample ids: int64[n]."""

MOST_NUMBER = 2**62
"""Largest block number, session number or count; at a million blocks per second, reached after 146,000 years."""

Whole = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
"""A block number, a session number or a count. Values from other processes are checked when they are decoded."""

_Words = NDArray[np.uint64]

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# NumPy scalars, made once: a Python int would be converted at each of some hundred operations per call.
_W_GAMMA, _W_MIX_1, _W_MIX_2 = np.uint64(_GAMMA), np.uint64(_MIX_1), np.uint64(_MIX_2)
_W_11, _W_27, _W_30, _W_31, _W_32 = map(np.uint64, (11, 27, 30, 31, 32))

# Each use of randomness has its own family of keys, so that no two are correlated.
_FOR_ORDER, _FOR_UNIFORMS, _FOR_GENERATOR, _FOR_SEGMENTS, _FOR_SPLIT, _FOR_DRAWING, _FOR_SHARE = 1, 2, 3, 4, 5, 6, 7

MOST_LEVELS = 32
"""Upper bound on nested shuffles. With three cuts each, a level takes 0.5 ms for a block of 832 samples, 18 ms in all.
A core prepares such a block in a second."""

_ROUNDS = 8  # even, because a pair of rounds changes both digits
_TINY = 256  # a Feistel network mixes few values badly: 8 rounds show a bias below 30, none from 50 on
_CHUNK = 8192  # keeps the scratch arrays of a pass (3 x 64 KiB) in a core's second-level cache


def _mix_word(word: int) -> int:
    word &= _MASK
    word = (word ^ (word >> 30)) * _MIX_1 & _MASK
    word = (word ^ (word >> 27)) * _MIX_2 & _MASK
    return word ^ (word >> 31)


def _mix(words: _Words) -> _Words:
    """Scramble 64-bit words one to one, in place."""
    words ^= words >> _W_30
    words *= _W_MIX_1
    words ^= words >> _W_27
    words *= _W_MIX_2
    words ^= words >> _W_31
    return words


def _keyed_words(key: int, count: int) -> _Words:
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * _W_GAMMA + np.uint64(_mix_word(key)))


def _derive_key(*parts: int) -> int:
    """Return a 64-bit key; each bit depends on every part and on the order of the parts."""
    key = 0
    for part in parts:
        key = _mix_word(_mix_word(key + _GAMMA) + int(part))
    return key


MOST_SEED = 2**63 - 1
"""The largest seed: NumPy and JSON readers use signed 64-bit integers."""


def check_seed(seed: int) -> None:
    """Raise ConfigError for a seed that is not an integer in [0, 2**63)."""
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"seed must be an integer in [0, 2**63), got {seed!r}")


class Permutation:
    """A keyed bijection of range(size) on itself, computed without a table; for 1 to 2**62 elements.

    A value is written as two digits, left * right_radix + right, with nearly equal radices whose product is ``size`` or
    just above. Eight Feistel rounds add a keyed hash of one digit to the other. The few results between ``size`` and
    the product (a fraction of about 1 / sqrt(size)) are permuted again until they are in range. With halves of a binary
    word, up to half of the results would be out of range. Up to 256 elements are shuffled exactly instead, by the ranks
    of 256 keyed hashes. Instances are immutable and may be shared between threads.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 2**62:
            raise ConfigError(f"the size of a permutation must be in [1, 2**62], got {size}")
        self.size = size
        left = math.isqrt(size - 1) + 1
        self._left, self._right = np.uint64(left), np.uint64(-(-size // left))
        words = _keyed_words(key, max(_ROUNDS, min(size, _TINY)))
        self._keys = tuple(words[:_ROUNDS])
        self._tiny = np.argsort(words[:size]) if size <= _TINY else None

    def __call__(self, positions: Ids) -> Ids:
        """Return the elements at ``positions``: int64[n] in [0, size) -> int64[n] in [0, size)."""
        positions = np.asarray(positions, dtype=np.int64)
        inside = positions.view(np.uint64) < self.size  # one comparison, because negative numbers become huge
        if not inside.all():
            raise ConfigError(f"a position must be in [0, {self.size}), got {positions[~inside][0]}")
        if self._tiny is not None:
            return self._tiny[positions]
        out = np.empty(len(positions), dtype=np.uint64)
        for start in range(0, len(out), _CHUNK):
            chunk = out[start : start + _CHUNK]
            chunk[:] = self._encrypt(positions[start : start + _CHUNK].view(np.uint64))
            outside = np.flatnonzero(chunk >= self.size)
            while len(outside):
                again = self._encrypt(chunk[outside])
                chunk[outside] = again
                outside = outside[again >= self.size]
        return out.view(np.int64)

    def _encrypt(self, values: _Words) -> _Words:
        left, right = np.divmod(values, self._right)
        scratch = np.empty_like(left), np.empty_like(left)
        for i in range(0, _ROUNDS, 2):
            self._add(left, self._left, self._hash(right, self._keys[i], self._left, scratch))
            self._add(right, self._right, self._hash(left, self._keys[i + 1], self._right, scratch))
        left *= self._right
        left += right
        return left

    @staticmethod
    def _hash(digit: _Words, key: np.uint64, radix: np.uint64, scratch: tuple[_Words, _Words]) -> _Words:
        """Return a keyed hash of each digit, in [0, radix), in the memory of ``scratch``."""
        word, shifted = scratch
        np.bitwise_xor(digit, key, out=word)
        np.multiply(word, _W_MIX_1, out=word)
        np.right_shift(word, _W_32, out=shifted)
        np.bitwise_xor(word, shifted, out=word)
        np.multiply(word, _W_MIX_2, out=word)
        np.right_shift(word, _W_32, out=word)
        np.multiply(word, radix, out=word)  # radix <= 2**31: scales without a division or an overflow
        np.right_shift(word, _W_32, out=word)
        return word

    @staticmethod
    def _add(digit: _Words, radix: np.uint64, term: _Words) -> None:
        """Set digit to (digit + term) mod radix, in place, for both in [0, radix); overwrite ``term``."""
        digit += term
        np.subtract(digit, radix, out=term)  # wraps to a huge number where no reduction is due
        np.minimum(digit, term, out=digit)


class Shuffle(Struct, frozen=True, array_like=True):
    """The shuffle of an epoch: of all samples, or within the segments of another epoch, its ``base``.

    A consumer that joins mid-epoch at position c takes the rest of that epoch, and then the first c positions of the
    next. These contain the samples that it lacks only if both epochs have the same samples before c, in whatever order.
    So while a consumer's epochs begin at c, the following epochs are shuffled within the segments that c cuts.

    ``epoch`` determines the order and the samples' random numbers; before each of the ascending ``cuts``, above 0, this
    epoch has the same samples as ``base``. Raises ConfigError for cuts without a base or the reverse.
    """

    epoch: Whole
    cuts: tuple[int, ...] = ()
    base: Shuffle | None = None

    def __post_init__(self) -> None:
        if bool(self.cuts) != (self.base is not None):
            raise ConfigError(
                f"a shuffle must have cuts exactly if it has a base, got cuts {self.cuts}, base {self.base}"
            )
        if any(low >= high for low, high in itertools.pairwise((0, *self.cuts))):
            raise ConfigError(f"cuts must ascend, and be above 0, got {self.cuts}")

    @property
    def levels(self) -> int:
        return 1 + (self.base.levels if self.base is not None else 0)

    @property
    def text(self) -> str:
        """A readable form: "7", or "8, in segments cut at 64, 512 of (7)"."""
        if self.base is None:
            return str(self.epoch)
        cuts = ", ".join(map(str, self.cuts))
        return f"{self.epoch}, in segments cut at {cuts} of ({self.base.text})"

    def keeps(self, cut: int, of: Shuffle) -> bool:
        """Return whether this epoch has the same samples before ``cut`` as the epoch ``of``."""
        if not cut or self == of:
            return True
        if cut not in self.cuts or self.base is None:
            return False
        # With the same base, both keep its samples before the cut, in different orders.
        return self.base == of or (cut in of.cuts and self.base == of.base) or self.base.keeps(cut, of)

    def after(self, epoch: int, cuts: Iterable[int]) -> Shuffle:
        """Return the shuffle of the next epoch, which keeps this epoch's samples before each of ``cuts``."""
        wanted = tuple(sorted({*cuts}))
        if not wanted:
            return Shuffle(epoch)
        # A consumer that leaves removes its cut: the next epoch has larger segments of the same base. A new cut was
        # made in this epoch, so it needs this epoch as its base.
        return Shuffle(epoch, wanted, self.base if {*wanted} <= {*self.cuts} else self)


ASIDE = 1 << 32
"""Epochs numbered from here on are outside of the stream (`mbaas.core.staging.epochs`), which never gets so long."""


class OwnEpoch(NamedTuple):
    """The run of blocks, [first, end), that gives one consumer each sample once: an epoch by its own count.

    ``begin`` is the position within the stream's epoch at which it begins, in block ``first``, and ends, in block
    ``end`` - 1. If this is in the middle of a block, as after a feed restart with another block size, the block is used
    twice: first its end, an epoch later its beginning.
    """

    first: int
    end: int
    begin: int = 0

    @classmethod
    def at(cls, first: int, blocks_per_epoch: int, block_samples: int) -> OwnEpoch:
        return cls(first, first + blocks_per_epoch, first % blocks_per_epoch * block_samples)

    def moved(self, by: int) -> OwnEpoch:
        return OwnEpoch(self.first + by, self.end + by, self.begin)


class SampleOrder(Struct, frozen=True):
    """The order of a feed: an endless stream of blocks, with `blocks_per_epoch` blocks in each epoch.

    A block is a run of consecutive positions of one epoch; only an epoch's last block may be shorter. Block numbers run
    over all epochs: epoch * blocks_per_epoch + number within the epoch. If ``redrawn``, each epoch draws its samples
    again (`mbaas.Dataset.resample`), and ids are numbers of draws. Raises ConfigError.
    """

    num_samples: int
    seed: int
    block_samples: int
    shuffled: bool = True
    redrawn: bool = False

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.num_samples < 1:
            raise ConfigError(f"num_samples must be at least 1, got {self.num_samples}")
        if self.block_samples < 1:
            raise ConfigError(f"block_samples must be at least 1, got {self.block_samples}")

    @property
    def blocks_per_epoch(self) -> int:
        return -(-self.num_samples // self.block_samples)

    def epoch_of(self, block: int) -> int:
        return block // self.blocks_per_epoch

    def chance_epoch(self, block: int, shuffle: Shuffle | None) -> int:
        """Return the epoch number that determines the random numbers in ``block``."""
        return self.epoch_of(block) if shuffle is None else shuffle.epoch

    def span(self, block: int) -> tuple[int, int]:
        start = block % self.blocks_per_epoch * self.block_samples
        return start, min(start + self.block_samples, self.num_samples)

    def size_of(self, block: int) -> int:
        """Return the number of samples of a block."""
        first, end = self.span(block)
        return end - first

    def sample_ids(self, block: int, shuffle: Shuffle | None = None) -> Ids:
        """Return the samples of ``block``, in order, by the shuffle of its epoch: int64[stop - start], read-only."""
        return _ids_of(self, block, shuffle or Shuffle(self.epoch_of(block)))

    def samples_at(self, shuffle: Shuffle, start: int, stop: int) -> Ids:
        """Return the samples at positions [start, stop) of an epoch, in order: int64[stop - start]."""
        positions = np.arange(start, stop, dtype=np.int64)
        return self._shuffled(positions, shuffle) if self.shuffled else positions

    def _shuffled(self, positions: Ids, shuffle: Shuffle) -> Ids:
        while shuffle.base is not None:
            positions = self._shuffled_within(positions, shuffle)
            shuffle = shuffle.base
        return _permutation(self.num_samples, self.seed, _FOR_ORDER, shuffle.epoch)(positions)

    def _shuffled_within(self, positions: Ids, shuffle: Shuffle) -> Ids:
        """Return the positions in the base; each stays in its segment."""
        bounds = np.array((0, *shuffle.cuts, self.num_samples))
        segments = np.searchsorted(bounds, positions, side="right") - 1
        found = np.empty_like(positions)
        for segment in np.unique(segments).tolist():
            first, end = bounds[segment : segment + 2].tolist()
            there = segments == segment
            shuffled = _permutation(end - first, self.seed, _FOR_SEGMENTS, shuffle.epoch, first)
            found[there] = first + shuffled(positions[there] - first)
        return found


@lru_cache(maxsize=8)  # a block's ids are requested several times in a row, and may take megabytes
def _ids_of(order: SampleOrder, block: int, shuffle: Shuffle) -> Ids:
    ids = order.samples_at(shuffle, *order.span(block))
    ids.flags.writeable = False
    return ids


@lru_cache(maxsize=256)  # feeds x the few epochs in flight x their segments; each holds a dozen numbers
def _permutation(size: int, seed: int, family: int, *parts: int) -> Permutation:
    return Permutation(size, _derive_key(family, seed, *parts))


def split_order(size: int, seed: int) -> Ids:
    """Return range(size) in the random order by which a dataset is split: int64[size].

    Independent of the order of any epoch, even with the same seed.
    """
    check_seed(seed)
    return Permutation(size, _derive_key(_FOR_SPLIT, seed))(np.arange(size, dtype=np.int64))


def drawing_chance(size: int, seed: int, epoch: int | None = None) -> tuple[Ids, float]:
    """Return range(size) in a random order, and a number in [0, 1), by which samples are drawn.

    Independent of the order of any epoch or split, even with the same seed. No ``epoch`` if they are drawn only once.
    """
    check_seed(seed)
    parts = ((), (1,)) if epoch is None else ((epoch, 0), (epoch, 1))
    for_order, for_start = (_derive_key(_FOR_DRAWING, seed, *part) for part in parts)
    (word,) = _keyed_words(for_start, 1)
    return Permutation(size, for_order)(np.arange(size, dtype=np.int64)), float(word >> _W_11) * 2.0**-53


def uniforms(
    seed: int, epoch: int, sample_ids: Ids, *, substream: int, draws: int, first: int = 0
) -> NDArray[np.float64]:
    """Return random numbers for samples: float64[n, draws], uniform in [0, 1), in steps of 2**-53.

    Row i depends only on (seed, epoch, sample_ids[i], substream), not on the other samples. A larger ``draws`` appends
    columns and leaves the first ones unchanged; ``first`` numbers are skipped. ``substream`` separates uses, for
    example the index of a transform in its pipeline.
    """
    check_seed(seed)
    key = _derive_key(_FOR_UNIFORMS, seed, epoch, substream)
    per_sample = _mix(np.asarray(sample_ids, dtype=np.int64).view(np.uint64) + np.uint64(key))
    counters = np.arange(first + 1, first + draws + 1, dtype=np.uint64) * _W_GAMMA
    words = _mix(per_sample[:, None] + counters)
    # The upper 53 bits fit a float64, so every result is exact and none is rounded up to 1.
    return np.asarray((words >> _W_11) * 2.0**-53, dtype=np.float64)


def generator(seed: int, epoch: int, sample_id: int, *, substream: int) -> np.random.Generator:
    """Return a new NumPy generator for one sample: the same arguments give the same numbers.

    Independent of `uniforms` with the same arguments. For code that draws an unknown count of numbers.
    """
    check_seed(seed)
    parts = (_FOR_GENERATOR, seed, epoch, substream, sample_id)
    key = np.array([_derive_key(*parts, half) for half in range(2)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def in_share(sample_ids: Ids, share: float) -> NDArray[np.bool_]:
    """Return which samples belong to a fixed, evenly chosen fraction of all samples, in [0, 1]: bool[n].

    It depends only on the sample id. The samples of a smaller fraction are a subset of a larger one.
    """
    words = _mix(np.asarray(sample_ids, dtype=np.int64).view(np.uint64) + np.uint64(_derive_key(_FOR_SHARE)))
    return np.asarray((words >> _W_11) * 2.0**-53 < share)


def id_hash(sample_ids: Ids) -> int:
    """Hash a multiset of sample ids, in any order, to a number in [0, 2**64).

    The hash is the sum of the mixed ids modulo 2**64. Hashes of parts add up (modulo 2**64) to the hash of the whole,
    and a missing or repeated sample changes it.
    """
    words = _mix(np.asarray(sample_ids, dtype=np.int64).view(np.uint64) + _W_GAMMA)
    return int(words.sum(dtype=np.uint64))


@lru_cache(maxsize=64)
def id_hash_of_range(num_samples: int) -> int:
    """Return the `id_hash` of all sample ids in [0, num_samples), in bounded memory."""
    chunks = range(0, num_samples, _CHUNK)
    return sum(id_hash(np.arange(i, min(i + _CHUNK, num_samples))) for i in chunks) & _MASK
