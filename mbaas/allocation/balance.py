"""Decides which rank of a data-parallel trial trains on which samples of a global minibatch.

Only the set of samples matters to the summed gradient, so each rank takes what its own node holds, and what is left
over moves to the ranks that lack samples ("Accelerating Data Loading in Deep Neural Network Training", 2019; here a
node with several ranks counts once, since a move within a node costs no message).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from mbaas.errors import ConfigError

NOWHERE = -1
"""The home of a sample that no node has cached."""

Ints = NDArray[np.int64]


class SampleMove(Struct, frozen=True):
    """``count`` things that go from ``giver`` to ``taker`` (indices) in one message."""

    giver: int
    taker: int
    count: int


def balance(counts: Sequence[int], *, targets: Sequence[int]) -> list[SampleMove]:
    """Find moves after which everyone holds its target: at most p - 1, within a factor 2 of the fewest, O(p log p).

    Each goes from the largest surplus to the largest deficit, with as much as both allow; among equals the lower index
    goes first.

    Raises:
        ConfigError: there are not as many counts as targets, or their sums differ.
    """
    if len(counts) != len(targets) or sum(counts) != sum(targets):
        raise ConfigError(
            f"targets must be as many as counts with the same sum ({len(counts)} with sum {sum(counts)}), "
            f"got {len(targets)} with sum {sum(targets)}"
        )
    rest = [(count - target, index) for index, (count, target) in enumerate(zip(counts, targets, strict=True))]
    surpluses = [(-over, index) for over, index in rest if over > 0]
    deficits = [(over, index) for over, index in rest if over < 0]
    heapq.heapify(surpluses)
    heapq.heapify(deficits)
    moves = []
    while surpluses:
        # surpluses are negated, because heapq keeps the smallest on top: both heads are below 0
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
    """Return how many samples each rank gets, int64[ranks]: the first ``samples % ranks`` one more than the others.

    It follows from the two numbers alone, so every rank knows its share without knowing where samples are.
    """
    return samples // ranks + (np.arange(ranks) < samples % ranks)


class _Nodes(Struct, frozen=True):
    """A minibatch seen by node; nodes are numbered here by ascending home index, with and without ranks.

    Attributes:
        of_sample: int64[n], the node of each sample, or `NOWHERE`.
        of_rank: int64[p], the node of each rank.
        owned: int64[nodes], samples that each node holds.
        room: int64[nodes], samples that its ranks are to get.
    """

    of_sample: Ints
    of_rank: Ints
    owned: Ints
    room: Ints

    @classmethod
    def see(cls, homes: Ints, rank_nodes: Ints) -> _Nodes:
        # by ascending index, so that the answer does not depend on which numbers the caller gave to nodes
        cached = homes != NOWHERE
        known = np.unique(np.concatenate([rank_nodes, np.flatnonzero(np.bincount(homes[cached]))]))
        of_rank = np.searchsorted(known, rank_nodes)
        of_sample = np.where(cached, np.searchsorted(known, homes), NOWHERE)
        owned = np.bincount(of_sample[cached], minlength=len(known))
        room = np.zeros(len(known), dtype=np.int64)
        np.add.at(room, of_rank, even_targets(len(homes), ranks=len(rank_nodes)))
        return cls(of_sample, of_rank, owned, room)


def assign(homes: ArrayLike, *, rank_nodes: ArrayLike) -> Ints:
    """Return the rank of each sample of a global minibatch; the same arguments always give the same answer.

    Every rank gets `even_targets`. A node's samples go to its own ranks as far as these have room, the earlier ones
    of the minibatch first. Samples cached nowhere go to nodes that lack samples, the smallest lack first, which ends
    most lacks without a message. The rest moves as `balance` says; a home without ranks gives all it has.

    Args:
        homes: int[n], index of the node that holds each sample, `NOWHERE` where none does.
        rank_nodes: int[p], index of each rank's node; ranks may share a node, and it need not be a home.

    Returns:
        int64[n], in [0, p).

    Raises:
        ConfigError: there is no rank, or an index is out of range.
    """
    sample_homes, nodes_of_ranks = _checked(homes, rank_nodes)
    nodes = _Nodes.see(sample_homes, nodes_of_ranks)
    # NumPy sorts 16-bit numbers by radix, several times as fast; this runs for every minibatch of every rank.
    node_of_sample = nodes.of_sample.astype(np.int16 if len(nodes.room) < 2**15 else np.int64)
    owned = _assign_uncached(node_of_sample, nodes)
    _assign_surplus(node_of_sample, nodes, balance(owned.tolist(), targets=nodes.room.tolist()))
    # stable sorts throughout: every rank computes this by itself, and all must come to the same
    ranks_by_node = np.argsort(nodes.of_rank, kind="stable")
    targets = even_targets(len(sample_homes), ranks=len(nodes_of_ranks))
    ranks = np.empty(len(sample_homes), dtype=np.int64)
    ranks[np.argsort(node_of_sample, kind="stable")] = np.repeat(ranks_by_node, targets[ranks_by_node])
    return ranks


def _assign_uncached(node_of_sample: NDArray[Any], nodes: _Nodes) -> Ints:
    """Give samples cached nowhere to nodes in deficit; return what every node then holds."""
    positions = np.flatnonzero(node_of_sample == NOWHERE)
    deficits = np.maximum(nodes.room - nodes.owned, 0)
    # A small lack that is filled needs no message at all; the same samples in a large one would only make it smaller.
    smallest_first = np.argsort(np.where(deficits, deficits, np.iinfo(np.int64).max), kind="stable")
    filled = np.minimum(np.cumsum(deficits[smallest_first]), len(positions))
    given = np.diff(filled, prepend=0)
    node_of_sample[positions] = np.repeat(smallest_first, given)
    held = nodes.owned.copy()
    held[smallest_first] += given
    return held


def _assign_surplus(node_of_sample: NDArray[Any], nodes: _Nodes, moves: list[SampleMove]) -> None:
    """Carry out the moves, with the last of the samples that each giver holds."""
    for giver in {move.giver for move in moves}:
        # a node keeps the earlier of its samples; which ones go makes no difference to the sum of the gradients
        spare = np.flatnonzero(node_of_sample == giver)[nodes.room[giver] :]
        outgoing = [move for move in moves if move.giver == giver]
        node_of_sample[spare] = np.repeat([move.taker for move in outgoing], [move.count for move in outgoing])


def _checked(homes: ArrayLike, rank_nodes: ArrayLike) -> tuple[Ints, Ints]:
    sample_homes, nodes_of_ranks = np.asarray(homes, dtype=np.int64), np.asarray(rank_nodes, dtype=np.int64)
    if not len(nodes_of_ranks):
        raise ConfigError("a minibatch is split between at least 1 rank, got 0")
    if (nodes_of_ranks < 0).any():
        raise ConfigError(f"rank_nodes must be 0 or more, got {int(nodes_of_ranks.min())}")
    if (sample_homes < NOWHERE).any():
        raise ConfigError(f"homes must be {NOWHERE} or more, got {int(sample_homes.min())}")
    return sample_homes, nodes_of_ranks
