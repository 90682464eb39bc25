"""The calls of consumers to a feed's coordinator."""

from __future__ import annotations

import abc
from typing import Any

import ray
from msgspec.structs import replace

from mbaas.calls import encoding
from mbaas.calls.server import CallServer, Spawn
from mbaas.coordinator.background import answer_or_none
from mbaas.coordinator.service import ConsumerService
from mbaas.core.staging import calls
from mbaas.core.staging import events as ev
from mbaas.core.staging.streams import in_core
from mbaas.wire.consumers import (
    Admission,
    BlockCall,
    ConsumerReport,
    Delivery,
    FeedInfo,
    JoinRequest,
    PartsCall,
)

RELAY_S = 2.0
"""Timeout for an actor to report the socket address of its relay, in seconds."""


class ConsumerApi(abc.ABC):
    """The calls of consumers.

    Each takes an encoded Struct of `mbaas.wire`, and raises ConfigError if it contains an invalid value.
    """

    def __init__(self, spawn: Spawn) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        self._calls = CallServer(self._deliver, spawn, self._find_relay)

    @abc.abstractmethod
    async def _until_open(self) -> ConsumerService:
        """Wait until the feed is open, and return the service.

        Raises:
            FeedFailedError: the feed did not open in time, or never will.
        """

    async def join(self, call: bytes) -> Admission:
        """Open a session, by a `JoinRequest`.

        Raises:
            FeedFailedError: the feed cannot continue.
            StateError: the trial continues with a different number of ranks.
        """
        request = encoding.decoded(call, JoinRequest)
        return (await self._until_open()).join(request)

    async def pipeline_info(self, fingerprint: str) -> FeedInfo | None:
        """Return the description of the feed for consumers with a pipeline; None if the feed does not know it."""
        return (await self._until_open()).pipelines.info_of(calls.name(fingerprint))

    async def add_pipeline(self, fingerprint: str, payload: bytes) -> FeedInfo:
        """Add a pipeline that a consumer brings, pickled; return the description of the feed with it.

        Raises:
            ConfigError: it does not suit the feed's samples, engine or memory.
            BadSampleError: no sample can be prepared with it.
        """
        return await (await self._until_open()).add_pipeline(calls.name(fingerprint), payload)

    async def ask(self, call: bytes) -> Delivery:
        """Answer a `BlockCall` that arrived through Ray; the answer may offer a socket for further calls."""
        asked = encoding.decoded(call, BlockCall)
        delivery, service = await self._deliver(asked), await self._until_open()
        consumer = service.core.consumers.session(asked.ask.consumer, asked.ask.session)
        if consumer is None or not consumer.node:
            return delivery
        consumers = service.core.consumers.on_node(consumer.node)
        return replace(delivery, socket=await self._socket_on(consumer.node, consumers))

    async def _deliver(self, asked: BlockCall) -> Delivery:
        """Wait until at least one block at or after a consumer's cursor is staged."""
        service = await self._until_open()
        stream = service.stream_of(asked.ask.consumer, asked.ask.session)
        calls.within_reach("cursor", asked.ask.cursor, service.core.out_of_reach(stream.number))
        for part in asked.unreadable:
            service.part_unreadable(in_core(part, stream))
        return await service.ask(asked.ask, asked.poll_s)

    async def _socket_on(self, node: str, consumers: int) -> str | None:
        """Return the socket address for that many consumers of a node, or None if they must call through Ray."""
        return await self._calls.address() if node == self._node else self._calls.relay_address(node, consumers)

    @abc.abstractmethod
    async def _relaying(self, node: str, may_start: bool) -> Any | None:
        """Return the actor that relays calls on a node, starting it if allowed; otherwise None."""

    async def _find_relay(self, node: str, may_start: bool) -> tuple[str, str] | None:
        actor, own = await self._relaying(node, may_start), ray.get_runtime_context()
        if actor is None:
            return None
        return await answer_or_none(actor.relay.remote(own.get_actor_id(), own.current_actor), RELAY_S)

    async def exchange(self, relay: str, number: int, requests: dict[int, bytes]) -> dict[int, bytes]:
        """Process relayed calls of consumers on another node and return answers; see `CallServer.exchange`."""
        return await self._calls.exchange(relay, number, requests)

    async def hand_back(self, call: bytes) -> None:
        """Take back blocks, by a `HandBack`, until the consumer requests them again."""
        event = encoding.decoded(call, ev.HandBack)
        service = await self._until_open()
        stream = service.stream_of(event.consumer, event.session)
        calls.within_reach("cursor", event.cursor, service.core.out_of_reach(stream.number))
        service.send(in_core(event, stream))

    async def is_given_up(self, call: bytes) -> bool:
        """Return whether any of the parts of a `PartsCall` has been replaced in its block."""
        asked = encoding.decoded(call, PartsCall)
        service = await self._until_open()
        stream, window = service.stream_of(asked.consumer, asked.session), service.core.window
        return not all(window.has(stream.first + part.block, part.part, part.task) for part in asked.parts)

    async def heartbeat(self, call: bytes, report: bytes) -> bool:
        """Renew a consumer's lease, by a `Heartbeat` and a `ConsumerReport`.

        Returns:
            False if its session is no longer open.
        """
        event, news = encoding.decoded(call, ev.Heartbeat), encoding.decoded(report, ConsumerReport)
        service = await self._until_open()
        self._take_report(event.consumer, news)
        answer = service.send(service.in_core(event))
        await self._until_kept(news)
        return not any(isinstance(i, ev.Refuse) and i.consumer == event.consumer for i in answer)

    async def leave(self, call: bytes, report: bytes | None = None) -> None:
        """End a consumer's session, by a `Leave` and its last `ConsumerReport`."""
        event = encoding.decoded(call, ev.Leave)
        news = None if report is None else encoding.decoded(report, ConsumerReport)
        service = await self._until_open()
        if news is not None:
            self._take_report(event.consumer, news)
        service.send(event)
        if news is not None:
            await self._until_kept(news)

    @abc.abstractmethod
    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        """Record a consumer's report."""

    @abc.abstractmethod
    async def _until_kept(self, report: ConsumerReport) -> None:
        """Wait until the ledgers of a report are stored. A loader that gets no answer sends them again."""
