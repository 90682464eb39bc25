"""Assignment of the samples of a global minibatch to the ranks of a data-parallel trial, and its traffic.

The summed gradient depends only on the set of samples, so each rank takes the samples that its own node holds. The
surplus moves to ranks with a deficit ("Accelerating Data Loading in Deep Neural Network Training", 2019). A node with
several ranks counts once here, because moves within a node need no message.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

NOWHERE = -1
"""Home index of a sample that no node has cached."""

Ints = NDArray[np.int64]


class SampleMove(Struct, frozen=True):
    """Transfer of ``count`` samples from index ``giver`` to index ``taker`` in one message."""

    giver: int
    taker: int
    count: int


def balance(counts: Sequence[int], *, targets: Sequence[int]) -> list[SampleMove]:
    """Return moves that bring every count to its target: at most p - 1, within a factor 2 of the fewest, O(p log p).

    Each move takes as much as possible from the largest surplus to the largest deficit. Ties go to the lower index.
    """
    rest = [(count - target, index) for index, (count, target) in enumerate(zip(counts, targets, strict=True))]
    surpluses = [(-over, index) for over, index in rest if over > 0]
    deficits = [(over, index) for over, index in rest if over < 0]
    heapq.heapify(surpluses)
    heapq.heapify(deficits)
    moves = []
    while surpluses:
        # Surpluses are negated for heapq's min-heap: both heads are below 0.
        (over, giver), (under, taker) = surpluses[0], deficits[0]
        count = min(-over, -under)
        moves.append(SampleMove(giver, taker, count))
        for heap, left, index in ((surpluses, over + count, giver), (deficits, under + count, taker)):
            if left:
                heapq.heapreplace(heap, (left, index))
            else:
                heapq.heappop(heap)
    return moves


def even_targets(samples: int, *, ranks: int) -> Ints:
    """Return the samples of each rank, int64[ranks]: the first ``samples % ranks`` ranks get one more."""
    return samples // ranks + (np.arange(ranks) < samples % ranks)


def travelling_share(nodes: int, *, local_batch: float, locality: bool) -> float:
    """Return the expected share of a global minibatch that travels, if its samples are on random nodes.

    Without ``locality``, each of n nodes takes random samples: (n - 1) / n, equation 7 of the paper above. With it,
    only the imbalance travels, beta in equation 8. A node needs B samples of a minibatch (``local_batch``) and holds
    X ~ Binomial(B n, 1 / n). The deficits are E[max(B - X, 0)] / B = (1 - 1 / n) P(X = B), by de Moivre's formula for
    the mean absolute deviation. This is about 0.4 / sqrt(B).
    """
    elsewhere = (nodes - 1) / nodes
    if not locality or nodes == 1:
        return elsewhere
    others = local_batch * (nodes - 1)
    # Logarithms, because factorials overflow. Gamma functions, because B may be a fraction.
    log_choices = math.lgamma(local_batch + others + 1) - math.lgamma(local_batch + 1) - math.lgamma(others + 1)
    return elsewhere * math.exp(log_choices - local_batch * math.log(nodes) + others * math.log1p(-1 / nodes))


def largest_home_share(nodes: int, *, samples: int) -> float:
    """Return the expected number of samples of the fullest home node, as a multiple of an even share, N / n.

    Homes are random, and their numbers vary with a standard deviation of about sqrt(N / n). The largest of n normal
    values is expected at the quantile (n - 3/8) / (n + 1/4) (Blom, "Statistical Estimates and Transformed
    Beta-Variables", 1958).
    """
    if nodes == 1:
        return 1.0
    largest = NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25))
    return min(float(nodes), 1 + largest * math.sqrt(nodes / samples))


class _Nodes(Struct, frozen=True):
    """A minibatch by node, int64 arrays. Nodes are numbered by ascending home index, with and without ranks.

    ``of_sample`` is `NOWHERE` for uncached samples; ``room`` is the total target of a node's ranks.
    """

    of_sample: Ints
    of_rank: Ints
    owned: Ints
    room: Ints

    @classmethod
    def see(cls, homes: Ints, rank_nodes: Ints) -> _Nodes:
        # Ascending order, so that the result does not depend on the caller's numbering of nodes.
        cached = homes != NOWHERE
        known = np.unique(np.concatenate([rank_nodes, np.flatnonzero(np.bincount(homes[cached]))]))
        of_rank = np.searchsorted(known, rank_nodes)
        of_sample = np.where(cached, np.searchsorted(known, homes), NOWHERE)
        owned = np.bincount(of_sample[cached], minlength=len(known))
        room = np.zeros(len(known), dtype=np.int64)
        np.add.at(room, of_rank, even_targets(len(homes), ranks=len(rank_nodes)))
        return cls(of_sample, of_rank, owned, room)


def assign(homes: ArrayLike, *, rank_nodes: ArrayLike) -> Ints:
    """Return the rank of each sample of a global minibatch, int64[n] in [0, p); deterministic.

    Every rank gets `even_targets`. A node's samples go to its own ranks until these are full, earlier ones first.
    Uncached samples go to nodes with a deficit, smallest first, which closes the most deficits without a message. The
    rest moves as in `balance`. A home without ranks gives all its samples away. ``homes`` are node indices, or
    `NOWHERE`; ``rank_nodes``, int64[p], are node indices. Ranks may share a node, and a node need not be a home.
    """
    sample_homes, nodes_of_ranks = np.asarray(homes, dtype=np.int64), np.asarray(rank_nodes, dtype=np.int64)
    nodes = _Nodes.see(sample_homes, nodes_of_ranks)
    # NumPy sorts 16-bit integers by radix, several times as fast. This runs for every minibatch of every rank.
    node_of_sample = nodes.of_sample.astype(np.int16 if len(nodes.room) < 2**15 else np.int64)
    owned = _assign_uncached(node_of_sample, nodes)
    _assign_surplus(node_of_sample, nodes, balance(owned.tolist(), targets=nodes.room.tolist()))
    # All sorts are stable: every rank computes this locally, and all must get the same result.
    ranks_by_node = np.argsort(nodes.of_rank, kind="stable")
    targets = even_targets(len(sample_homes), ranks=len(nodes_of_ranks))
    ranks = np.empty(len(sample_homes), dtype=np.int64)
    ranks[np.argsort(node_of_sample, kind="stable")] = np.repeat(ranks_by_node, targets[ranks_by_node])
    return ranks


def _assign_uncached(node_of_sample: NDArray[Any], nodes: _Nodes) -> Ints:
    """Assign uncached samples to nodes with a deficit; return the samples that each node then holds."""
    positions = np.flatnonzero(node_of_sample == NOWHERE)
    deficits = np.maximum(nodes.room - nodes.owned, 0)
    # A small deficit that is filled needs no message. The same samples would only reduce a large one.
    smallest_first = np.argsort(np.where(deficits, deficits, np.iinfo(np.int64).max), kind="stable")
    filled = np.minimum(np.cumsum(deficits[smallest_first]), len(positions))
    given = np.diff(filled, prepend=0)
    node_of_sample[positions] = np.repeat(smallest_first, given)
    held = nodes.owned.copy()
    held[smallest_first] += given
    return held


def _assign_surplus(node_of_sample: NDArray[Any], nodes: _Nodes, moves: list[SampleMove]) -> None:
    for giver in {move.giver for move in moves}:
        # A node keeps its earlier samples. The choice does not change the summed gradient.
        spare = np.flatnonzero(node_of_sample == giver)[nodes.room[giver] :]
        outgoing = [move for move in moves if move.giver == giver]
        node_of_sample[spare] = np.repeat([move.taker for move in outgoing], [move.count for move in outgoing])
