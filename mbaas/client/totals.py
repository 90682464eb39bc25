"""The totals that a loader reports to its feed.

They outlive a loader that is garbage collected without `close`, so that its last ledgers are reported too.
"""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import replace

from mbaas.client.stalls import MinibatchWaits, StreamStats
from mbaas.wire.consumers import ConsumerReport
from mbaas.wire.samples import EpochLedger


class Totals:
    """Totals of a loader since it was created. The trial's thread counts; any thread may report.

    Attributes:
        blocks: waits for blocks, and bytes read.
        waits: waits for minibatches.
        samples: number of samples delivered to the trial.
        step_s: seconds that the trial worked between minibatches.
    """

    def __init__(self) -> None:
        self._loader, self._created_at = uuid.uuid4().hex, time.perf_counter()
        self.blocks, self.waits = StreamStats(), MinibatchWaits(now=self._created_at)
        self.samples, self.step_s, self._first_batch_s = 0, 0.0, 0.0
        self._ledgers: list[EpochLedger] = []  # not yet acknowledged by the service
        self._acknowledged = 0  # number of ledgers before those
        self._lock = threading.Lock()  # for the ledgers

    def hand_out(self, samples: int, now: float, *, step: int | None) -> None:
        """Count a minibatch; ``now`` is `time.perf_counter`, and ``step`` as in `MinibatchWaits.hand_out`."""
        self.samples += samples
        self.waits.hand_out(self.blocks.wait_s, now, step=step)
        self._first_batch_s = self._first_batch_s or now - self._created_at

    def add(self, ledger: EpochLedger) -> None:
        """Add the ledger of a finished epoch."""
        with self._lock:
            self._ledgers.append(ledger)

    def report(self) -> ConsumerReport:
        """Return the totals, without ledgers and steps."""
        return ConsumerReport(
            loader=self._loader,
            samples=self.samples,
            prepared=self.blocks.prepared,
            wait_s=self.blocks.wait_s,
            fetch_stall_s=self.blocks.fetch_stall_s,
            peer_stall_s=self.blocks.peer_stall_s,
            step_s=self.step_s,
            read_bytes=self.blocks.read_bytes,
            time_to_first_batch_s=self._first_batch_s,
            waits=self.waits.counts,
        )

    def full_report(self) -> ConsumerReport:
        """Return the totals with all ledgers and steps that were not acknowledged.

        Includes those that another thread is sending: it may fail, and the service enters each only once.
        """
        first_step, steps = self.waits.unreported()
        report = replace(self.report(), steps=steps, first_step=first_step)
        with self._lock:
            return replace(report, ledgers=tuple(self._ledgers), first_ledger=self._acknowledged)

    def acknowledge(self, report: ConsumerReport) -> None:
        """Forget the ledgers and steps of a report that the service has received."""
        self.waits.acknowledge(report.first_step + len(report.steps))
        with self._lock:
            # Another thread may have reported more meanwhile.
            acknowledged = max(self._acknowledged, report.first_ledger + len(report.ledgers))
            del self._ledgers[: acknowledged - self._acknowledged]
            self._acknowledged = acknowledged
