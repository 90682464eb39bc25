"""Order and chance as arithmetic: pure functions of (seed, epoch, position or sample id).

Nothing here holds a table or a hidden state. `Permutation` maps a position to a sample and back in O(1)
memory, `Shuffle` says what order an epoch has, `SampleOrder` computes it and cuts the epoch into blocks, `uniforms` and
`generator` give each sample its random numbers, and `id_hash` shows whether an epoch held each sample once.

The permutation is the generalised Feistel cipher with cycle walking of Black and Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002). The hash is the finaliser of SplitMix64 (Steele, Lea and Flood,
OOPSLA 2014). Neither is meant to resist an attacker: they are even, fast, and the same on every machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.errors import ConfigError

Ids = NDArray[np.int64]
"""Positions or sample ids: int64[n]."""

_Words = NDArray[np.uint64]
_Pass = Callable[[_Words], _Words]

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# NumPy scalars, made once: a Python int would be converted again at each of some hundred operations a call.
_W_GAMMA, _W_MIX_1, _W_MIX_2 = np.uint64(_GAMMA), np.uint64(_MIX_1), np.uint64(_MIX_2)
_W_11, _W_27, _W_30, _W_31, _W_32 = map(np.uint64, (11, 27, 30, 31, 32))

# Every use of chance has a family of keys of its own, so that no two can be correlated.
_FOR_ORDER, _FOR_UNIFORMS, _FOR_GENERATOR, _FOR_SEGMENTS, _FOR_SPLIT, _FOR_DRAWING, _FOR_SHARE = 1, 2, 3, 4, 5, 6, 7

MOST_LEVELS = 32
"""Shuffles that may lie within each other. With three cuts each was measured to cost 0.5 ms for a block of 832 samples,
18 ms in all, where a core prepares the block in a second.
"""

_ROUNDS = 8  # even, because a pair of rounds changes both digits
_TINY = 256  # a Feistel network mixes few values badly: 8 rounds show a bias below 30, none from 50 on
_CHUNK = 8192  # keeps the scratch arrays of a pass (3 x 64 KiB) in a core's second-level cache


def _mix_word(word: int) -> int:
    """Do what `_mix` does to a single word, with Python's integers."""
    word &= _MASK
    word = (word ^ (word >> 30)) * _MIX_1 & _MASK
    word = (word ^ (word >> 27)) * _MIX_2 & _MASK
    return word ^ (word >> 31)


def _mix(words: _Words) -> _Words:
    """Scramble 64-bit words, one to one, in place, and return them."""
    words ^= words >> _W_30
    words *= _W_MIX_1
    words ^= words >> _W_27
    words *= _W_MIX_2
    words ^= words >> _W_31
    return words


def _keyed_words(key: int, count: int) -> _Words:
    """Return the first ``count`` words of the random sequence of a key: uint64[count]."""
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * _W_GAMMA + np.uint64(_mix_word(key)))


def _derive_key(*parts: int) -> int:
    """Make a 64-bit key in which every bit depends on every part and on the order of the parts."""
    key = 0
    for part in parts:
        key = _mix_word(_mix_word(key + _GAMMA) + int(part))
    return key


MOST_SEED = 2**63 - 1
"""The largest seed: NumPy and JSON's readers have whole numbers of 64 bits with a sign."""


def check_seed(seed: int) -> None:
    """Refuse a seed outside [0, 2**63).

    Raises:
        ConfigError: the seed is out of range or not an integer.
    """
    if not isinstance(seed, (int, np.integer)) or not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"seed must be an integer in [0, 2**63), got {seed!r}")


class Permutation:
    """A keyed bijection of range(size) on itself, computed, never stored.

    A value is written as two digits, left * right_radix + right, with nearly equal radices whose product is ``size`` or
    just above; eight Feistel rounds add a keyed hash of one digit to the other. The few results between ``size`` and
    the product (a share of about 1 / sqrt(size)) go through again until they fall inside. With halves of a binary word
    that could be every second one; this is what keeps small batches cheap. Up to 256 elements are shuffled exactly
    instead: by the ranks of 256 keyed hashes.

    Instances are immutable and may be shared between threads.
    """

    def __init__(self, size: int, key: int) -> None:
        """
        Args:
            size: number of elements, in [1, 2**62].
            key: any integer; its low 64 bits choose the permutation.
        """
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
        values = self._checked(positions)
        return self._walk(values, self._encrypt) if self._tiny is None else self._tiny[values]

    def inverse(self, values: Ids) -> Ids:
        """Return the positions of ``values``: int64[n] in [0, size) -> int64[n] in [0, size)."""
        values = self._checked(values)
        return self._walk(values, self._decrypt) if self._tiny is None else np.argsort(self._tiny)[values]

    def _checked(self, values: Ids) -> Ids:
        values = np.asarray(values, dtype=np.int64)
        inside = values.view(np.uint64) < self.size  # one comparison: negative numbers become huge
        if not inside.all():
            wrong = values[~inside][0]
            raise ConfigError(f"a position or sample id must be in [0, {self.size}), got {wrong}")
        return values

    def _walk(self, values: Ids, one_pass: _Pass) -> Ids:
        """Map each value until it falls in [0, size), a chunk at a time."""
        out = np.empty(len(values), dtype=np.uint64)
        for start in range(0, len(out), _CHUNK):
            chunk = out[start : start + _CHUNK]
            chunk[:] = one_pass(values[start : start + _CHUNK].view(np.uint64))
            outside = np.flatnonzero(chunk >= self.size)
            while len(outside):
                again = one_pass(chunk[outside])
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

    def _decrypt(self, values: _Words) -> _Words:
        left, right = np.divmod(values, self._right)
        scratch = np.empty_like(left), np.empty_like(left)
        for i in range(_ROUNDS - 2, -1, -2):
            self._subtract(right, self._right, self._hash(left, self._keys[i + 1], self._right, scratch))
            self._subtract(left, self._left, self._hash(right, self._keys[i], self._left, scratch))
        left *= self._right
        left += right
        return left

    @staticmethod
    def _hash(digit: _Words, key: np.uint64, radix: np.uint64, scratch: tuple[_Words, _Words]) -> _Words:
        """Return a keyed hash of each digit, in [0, radix); the result lives in ``scratch``."""
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

    @staticmethod
    def _subtract(digit: _Words, radix: np.uint64, term: _Words) -> None:
        """Set digit to (digit - term) mod radix, in place, for both in [0, radix); overwrite ``term``."""
        digit -= term
        np.add(digit, radix, out=term)  # the smaller of the two is the one that did not wrap
        np.minimum(digit, term, out=digit)


class Shuffle(Struct, frozen=True):
    """How the samples of an epoch are shuffled: all together, or within the segments of another epoch.

    A consumer that begins in the middle of an epoch, at position c, takes what is left of it, and then the first c
    positions of the next epoch. These hold the samples that it lacks only if that epoch has the same samples before c
    as the one before, in whatever order. So while anybody's epochs begin at c, the epochs that follow are shuffled
    within the segments that c cuts.

    Attributes:
        epoch: the number that chance follows from: of the order, and of the samples' random numbers.
        cuts: positions, ascending, above 0, before which this epoch has the same samples as ``base``; none in an epoch
            that is shuffled as a whole.
        base: the shuffle whose segments are shuffled; None for an epoch that is shuffled as a whole.

    Raises:
        ConfigError: there are cuts without a base, the other way round, or cuts that do not ascend.
    """

    epoch: int
    cuts: tuple[int, ...] = ()
    base: Shuffle | None = None

    def __post_init__(self) -> None:
        if bool(self.cuts) != (self.base is not None):
            raise ConfigError(f"a shuffle has cuts exactly if it has a base, got cuts {self.cuts}, base {self.base}")
        if any(low >= high for low, high in itertools.pairwise((0, *self.cuts))):
            raise ConfigError(f"cuts must ascend, and be above 0, got {self.cuts}")

    @property
    def levels(self) -> int:
        """How many shuffles lie within each other."""
        return 1 + (self.base.levels if self.base is not None else 0)

    @property
    def text(self) -> str:
        """The shuffle in words: "7", or "8, in segments cut at 64, 512 of (7)"."""
        if self.base is None:
            return str(self.epoch)
        cuts = ", ".join(map(str, self.cuts))
        return f"{self.epoch}, in segments cut at {cuts} of ({self.base.text})"

    def keeps(self, cut: int, of: Shuffle) -> bool:
        """Whether this epoch has the same samples before ``cut`` as the epoch ``of``."""
        if not cut or self == of:
            return True
        if cut not in self.cuts or self.base is None:
            return False
        # Of the same base, both keep its samples before the cut, in other orders.
        return self.base == of or (cut in of.cuts and self.base == of.base) or self.base.keeps(cut, of)

    def after(self, epoch: int, cuts: Iterable[int]) -> Shuffle:
        """Return the shuffle of the epoch that follows this one and keeps its samples before each of ``cuts``."""
        wanted = tuple(sorted({*cuts}))
        if not wanted:
            return Shuffle(epoch)
        # A consumer that leaves takes its cut away: the rest is shuffled within larger segments of the same base. A
        # new cut was made in this epoch, so only what this epoch has before it is known to be the same.
        return Shuffle(epoch, wanted, self.base if {*wanted} <= {*self.cuts} else self)


ASIDE = 1 << 32
"""Epochs from this number on are aside of the stream (`mbaas.core.epochs`), which never gets so far."""


class OwnEpoch(NamedTuple):
    """The run of blocks in which one consumer gets each sample once: an epoch as it counts them.

    It begins where an epoch of the stream does, or in the middle of one, if the consumer joined there.

    Attributes:
        first: the block in which it begins.
        end: one past the block in which it ends.
        begin: the position within the stream's epoch at which it begins, in block ``first``, and before which it ends,
            in block ``end`` - 1. Where that is in the middle of a block, as in a feed with other blocks than the one in
            which the consumer joined, that block comes twice: first its end, an epoch later its beginning.
    """

    first: int
    end: int
    begin: int = 0

    @classmethod
    def at(cls, first: int, blocks_per_epoch: int, block_samples: int) -> OwnEpoch:
        """Return the epoch that begins with block ``first``."""
        return cls(first, first + blocks_per_epoch, first % blocks_per_epoch * block_samples)

    def moved(self, by: int) -> OwnEpoch:
        """Return the same epoch where all blocks have other numbers."""
        return OwnEpoch(self.first + by, self.end + by, self.begin)


class SampleOrder(Struct, frozen=True):
    """The order of a feed: an endless stream of blocks, `blocks_per_epoch` of them to an epoch.

    A block is a run of consecutive positions of one epoch; only the last of an epoch may be shorter. Block numbers run
    over all epochs: epoch * blocks_per_epoch + number within the epoch.

    Attributes:
        num_samples: number of samples of the dataset, at least 1.
        seed: chooses the orders, in [0, 2**63).
        block_samples: samples in a block, at least 1.
        shuffled: whether each epoch has a permutation of its own; else all have the samples in the dataset's order.
        redrawn: whether each epoch draws its samples anew (`mbaas.dataset.redrawn`); ids are the numbers of draws then.

    Raises:
        ConfigError: an attribute is out of range.
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
        """Number of blocks in an epoch, the last of which may be shorter."""
        return -(-self.num_samples // self.block_samples)

    def epoch_of(self, block: int) -> int:
        """Return the epoch that ``block`` belongs to."""
        return block // self.blocks_per_epoch

    def chance_epoch(self, block: int, shuffle: Shuffle | None) -> int:
        """Return the number of an epoch from which the chance in ``block`` follows; its own, if no shuffle says."""
        return self.epoch_of(block) if shuffle is None else shuffle.epoch

    def span(self, block: int) -> tuple[int, int]:
        """Return the positions [start, stop) of ``block`` within its epoch."""
        start = block % self.blocks_per_epoch * self.block_samples
        return start, min(start + self.block_samples, self.num_samples)

    def sample_ids(self, block: int, shuffle: Shuffle | None = None) -> Ids:
        """Return the samples of ``block``, in order: int64[stop - start], read-only.

        Args:
            block: its number.
            shuffle: of the block's epoch; by default that is shuffled as a whole.
        """
        return _ids_of(self, block, shuffle or Shuffle(self.epoch_of(block)))

    def samples_at(self, shuffle: Shuffle, start: int, stop: int) -> Ids:
        """Return the samples at positions [start, stop) of an epoch, in order: int64[stop - start]."""
        positions = np.arange(start, stop, dtype=np.int64)
        return self._shuffled(positions, shuffle) if self.shuffled else positions

    def positions(self, epoch: int, sample_ids: Ids) -> Ids:
        """Return where the samples come in an epoch that is shuffled as a whole: int64[n] -> int64[n]."""
        if not self.shuffled:
            return sample_ids
        return _permutation(self.num_samples, self.seed, _FOR_ORDER, epoch).inverse(sample_ids)

    def _shuffled(self, positions: Ids, shuffle: Shuffle) -> Ids:
        while shuffle.base is not None:
            positions = self._shuffled_within(positions, shuffle)
            shuffle = shuffle.base
        return _permutation(self.num_samples, self.seed, _FOR_ORDER, shuffle.epoch)(positions)

    def _shuffled_within(self, positions: Ids, shuffle: Shuffle) -> Ids:
        """Return the positions in the base: each is in the segment in which it was."""
        bounds = np.array((0, *shuffle.cuts, self.num_samples))
        segments = np.searchsorted(bounds, positions, side="right") - 1
        found = np.empty_like(positions)
        for segment in np.unique(segments).tolist():
            first, end = bounds[segment : segment + 2].tolist()
            there = segments == segment
            shuffled = _permutation(end - first, self.seed, _FOR_SEGMENTS, shuffle.epoch, first)
            found[there] = first + shuffled(positions[there] - first)
        return found


@lru_cache(
    maxsize=8
)  # the samples of a block are asked for several times in a row; a large block has megabytes of them
def _ids_of(order: SampleOrder, block: int, shuffle: Shuffle) -> Ids:
    ids = order.samples_at(shuffle, *order.span(block))
    ids.flags.writeable = False
    return ids


@lru_cache(maxsize=256)  # feeds x the few epochs that are in flight x their segments; each holds a dozen numbers
def _permutation(size: int, seed: int, family: int, *parts: int) -> Permutation:
    return Permutation(size, _derive_key(family, seed, *parts))


def split_order(size: int, seed: int) -> Ids:
    """Return the numbers below ``size`` in a random order, by which a dataset is split: int64[size].

    It has nothing to do with the order of any epoch, also where the seeds are the same.
    """
    check_seed(seed)
    return Permutation(size, _derive_key(_FOR_SPLIT, seed))(np.arange(size, dtype=np.int64))


def drawing_chance(size: int, seed: int, epoch: int | None = None) -> tuple[Ids, float]:
    """Return the numbers below ``size`` in a random order, and a number in [0, 1), by which samples are drawn.

    They have nothing to do with the order of any epoch or split, also where the seeds are the same. ``epoch`` is that
    for which samples are drawn; None where they are drawn once.
    """
    check_seed(seed)
    parts = ((), (1,)) if epoch is None else ((epoch, 0), (epoch, 1))
    for_order, for_start = (_derive_key(_FOR_DRAWING, seed, *part) for part in parts)
    (word,) = _keyed_words(for_start, 1)
    return Permutation(size, for_order)(np.arange(size, dtype=np.int64)), float(word >> _W_11) * 2.0**-53


def uniforms(
    seed: int, epoch: int, sample_ids: Ids, *, substream: int, draws: int, first: int = 0
) -> NDArray[np.float64]:
    """Return the random numbers of samples: float64[n, draws], uniform in [0, 1), in steps of 2**-53.

    Row i depends on (seed, epoch, sample_ids[i], substream) alone: neither on its neighbours nor on their order. A
    larger ``draws`` appends columns and leaves the first ones as they are.

    Args:
        seed: in [0, 2**63).
        epoch: number of the epoch, from 0.
        sample_ids: int64[n], from 0.
        substream: keeps users of chance apart, e.g. the index of a transform in its pipeline.
        draws: numbers a sample.
        first: how many to leave out before these.
    """
    check_seed(seed)
    key = _derive_key(_FOR_UNIFORMS, seed, epoch, substream)
    per_sample = _mix(np.asarray(sample_ids, dtype=np.int64).view(np.uint64) + np.uint64(key))
    counters = np.arange(first + 1, first + draws + 1, dtype=np.uint64) * _W_GAMMA
    words = _mix(per_sample[:, None] + counters)
    # the upper 53 bits, as many as a float64 has: every result is exact, and none is rounded up to 1
    return np.asarray((words >> _W_11) * 2.0**-53, dtype=np.float64)


def generator(seed: int, epoch: int, sample_id: int, *, substream: int) -> np.random.Generator:
    """Make a fresh NumPy generator for one sample: the same arguments give the same numbers.

    Independent of `uniforms` with the same arguments. For code that cannot say how many numbers it will draw.
    """
    check_seed(seed)
    parts = (_FOR_GENERATOR, seed, epoch, substream, sample_id)
    key = np.array([_derive_key(*parts, half) for half in range(2)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def in_share(sample_ids: Ids, share: float) -> NDArray[np.bool_]:
    """Tell which samples belong to a share of all, chosen evenly and for good: bool[n].

    It depends on nothing but the sample, and those of a smaller share belong to a larger one, too.

    Args:
        sample_ids: int64[n], from 0.
        share: in [0, 1].
    """
    words = _mix(np.asarray(sample_ids, dtype=np.int64).view(np.uint64) + np.uint64(_derive_key(_FOR_SHARE)))
    return np.asarray((words >> _W_11) * 2.0**-53 < share)


def id_hash(sample_ids: Ids) -> int:
    """Hash a multiset of sample ids, in any order, to a number in [0, 2**64).

    It is the sum of the mixed ids modulo 2**64: hashes of parts add up (modulo 2**64) to the hash of the
    whole, and a missing or repeated sample changes it.
    """
    words = _mix(np.asarray(sample_ids, dtype=np.int64).view(np.uint64) + _W_GAMMA)
    return int(words.sum(dtype=np.uint64))


@lru_cache(maxsize=64)
def id_hash_of_range(num_samples: int) -> int:
    """Return the `id_hash` of all sample ids in [0, num_samples), in bounded memory."""
    chunks = range(0, num_samples, _CHUNK)
    return sum(id_hash(np.arange(i, min(i + _CHUNK, num_samples))) for i in chunks) & _MASK
