"""Row "tensorsocket": one DataLoader for all trials, shared by TensorSocket (Robroek et al., 2024).

A producer process wraps the DataLoader of row "dataloader", with workers on all cores, and sends each minibatch to the
consumers in all trials. All options but one are TensorSocket's defaults. By default it joins eight minibatches before
it sends them, and drops the last eight of an epoch, and any smaller one. With two it loses the fewest; with one
(version 0.0.5) it ends with an error.
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from typing import Any

from mbaas.tools.bench.host import end_host, kill_tree
from mbaas.tools.bench.rows import Epoch, Minibatch, RowSpec

SENT_TOGETHER = 2
"""Minibatches of the DataLoader that TensorSocket joins into one message."""

LOOK_S = 0.1


@contextmanager
def service(spec: RowSpec) -> Iterator[str]:
    """Run the producer in its own process."""
    ports = _free_ports(4)
    process = mp.get_context("spawn").Process(target=_produce, args=(spec, ports))
    is_over = threading.Event()

    def watch() -> None:
        # End the row if the producer ends: its consumers would wait forever.
        wait([process.sentinel])
        if not is_over.is_set():
            end_host()  # the producer has written the reason

    process.start()
    threading.Thread(target=watch, name="tensorsocket-watch", daemon=True).start()
    try:
        yield ",".join(map(str, ports))
    finally:
        is_over.set()
        assert process.pid is not None
        kill_tree(process.pid)  # it produces epochs forever
        process.join()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _produce(spec: RowSpec, ports: list[int]) -> None:
    from tensorsocket import producer

    from mbaas.tools.bench.rows.dataloader import make_loader

    producer.LOCALHOST = "tcp://127.0.0.1"  # by default it listens on all interfaces
    data, acknowledged, *heart = ports
    sender = producer.TensorProducer(
        make_loader(spec, spec.settings.cores, _tensors),
        port=data,
        ack_port=acknowledged,
        heart_ports=tuple(heart),
        producer_batch_size=SENT_TOGETHER,
    )
    while len(sender.hb.consumers) < spec.trials:  # otherwise late consumers would miss minibatches
        time.sleep(LOOK_S)
    while True:
        for _ in sender:
            pass


def _tensors(minibatch: Any) -> Any:
    # Only pixels and sample ids: TensorSocket cannot send packed fields.
    return minibatch[:2]


@contextmanager
def loader(spec: RowSpec) -> Iterator[Epoch]:
    """Consume in a trial. The threads of a TensorConsumer are daemons, and it cannot be closed."""
    from tensorsocket import TensorConsumer

    data, acknowledged, *heart = map(int, spec.address.split(","))
    consumer = TensorConsumer(data, acknowledged, tuple(heart), batch_size=spec.batch)

    def epoch() -> Iterator[Minibatch]:
        for pixels, ids in consumer:
            yield [pixels.numpy()], ids.numpy()

    yield epoch
