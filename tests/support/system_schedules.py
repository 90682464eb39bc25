"""Random schedules of a whole feed in virtual time: supervisor, staging core, placements and consumers.

`System` runs the real decision code and plays everything else: Ray, nodes and actors (`support.cluster_schedules`), the
coordinator's shell, trials (`support.system_trials`), and a network. The network delays, reorders, duplicates and
loses calls between trials and the coordinator. Everything may die, hang or be unreachable at any time, alone or
together, including the coordinator. Then all faults end. At all times:

- a trial takes each block of its epochs exactly once, in order, with exactly the block's samples;
- a block that a trial holds counts towards the staging budget, which is never exceeded;
- no worker or node that is gone is in use, and only workers that hung are given up;
- the feed never ends without a reason, and every error that a trial gets has one.

After the faults, every living trial makes progress within `PEACE_S`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mbaas.core.cluster import events as cluster
from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.staging.epochs import PAGE_EPOCHS
from mbaas.core.staging.state import WORKER_FAILURES, StagingState
from mbaas.samples.order import Ids, OwnEpoch, Shuffle
from mbaas.samples.placement import PartRequest
from mbaas.settings import Timeouts
from mbaas.wire.consumers import Resumption, Start
from support import cluster_schedules
from support.cluster_schedules import BLOCK_SAMPLES, Cluster
from support.orders import Order
from support.schedules import drawn_slack
from support.system_trials import Answer, Checkpoint, Delivered, Part, Reply, Trial

PEACE_S = 600.0
"""Virtual seconds after the last fault within which trials must make progress and all workers be up."""

TIMEOUTS = Timeouts(lease_s=18.0, reservation_s=10.0, patience_s=8.0, prep_s=40.0)
POLL_S = 20.0
CALL_S = 30.0
"""A call without an answer fails after this time."""

BAD = "a sample is bad"

KEEPING = 0.1
"""Fraction of schedules whose epochs are all identical, so that one epoch's blocks stay staged."""


class Service:
    """The staging core in one life of the coordinator, and the work of `mbaas.coordinator.service` around it.

    ``life`` is the unique number of this life.
    """

    def __init__(self, system: System) -> None:
        self._system, self.life = system, next(system.lives)
        self.core = StagingState(
            system.limits,
            system.order.blocks_per_epoch,
            system.block_bytes,
            system.placements.parts,
            keeps_all=system.keeps_all,
            block_samples=BLOCK_SAMPLES,
            is_shuffled=system.order.shuffled,
            written=system.written,
        )
        self._staged: dict[int, dict[int, Part]] = {}
        self._copies: dict[int, str] = {}  # number of a move -> node of the copy
        self._calls: dict[str, tuple[int, Reply]] = {}

    @property
    def workers(self) -> dict[str, str]:
        return {worker.name: worker.node for worker in self.core.tasks.workers.values()}

    def tick(self) -> None:
        self.tell(ev.Tick())
        if (paces := self._system.paces()) is not None:
            self.tell(paces)

    def tell(self, event: ev.Event) -> list[ev.Instruction]:
        """Pass an event to the core and carry out its instructions."""
        self._system.story.append((self._system.now, event))
        done = self.core.handle(event, self._system.now)
        self.core.validate()
        for instruction in done:
            self._system.story.append(instruction)
            self._carry_out(instruction)
        return done

    def _report(self, event: cluster.WorkerDied | cluster.WorkerBehind | cluster.WorkerDone) -> None:
        """Report an event of a worker to its supervisor."""
        for _ in range(self._system.rng.randint(1, 2)):
            self._system.send_later(event)

    # ---- calls from trials ----

    def join(self, name: str, start: Start, reply: Reply) -> None:
        session = next(self._system.sessions)
        self._answer(name, Answer(expelled=True))  # its old call is over, as if it had joined elsewhere
        for instruction in self.tell(ev.Join(name, session, start.block, start.flexible, start.now, start.resumed)):
            if isinstance(instruction, ev.Admitted):
                reply(Answer(admitted=(session, instruction.cursor, instruction.own_epoch)))

    def ask(self, event: ev.Ask, unreadable: Iterable[ev.UnreadablePart], reply: Reply) -> None:
        for part in unreadable:
            self.tell(part)
        self._answer(event.consumer, Answer())
        call = self._calls[event.consumer] = event.session, reply
        self.tell(event)

        def poll_is_over() -> None:
            if self._system.is_alive(self.life) and self._calls.get(event.consumer) is call:
                self._answer(event.consumer, Answer())

        if self._calls.get(event.consumer) is call:
            self._system.later(poll_is_over, POLL_S, POLL_S)

    def heartbeat(self, event: ev.Heartbeat, reply: Reply) -> None:
        refused = any(isinstance(i, ev.Refuse) and i.consumer == event.consumer for i in self.tell(event))
        reply(Answer(expelled=refused))

    def is_given_up(self, block: Delivered, reply: Reply) -> None:
        """Answer ``expelled`` if a part no longer belongs to the block."""
        window = self.core.window
        reply(Answer(expelled=not all(window.has(block.number, part.number, part.task) for part in block.parts)))

    def _answer(self, name: str, answer: Answer) -> None:
        call = self._calls.pop(name, None)
        if call is not None:
            call[1](answer)

    # ---- instructions ----

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Prepare():
                self._make(instruction)
            case ev.Deliver():
                blocks = (replace(self._delivered(n), as_copy=instruction.as_copy) for n in instruction.blocks)
                self._answer(instruction.consumer, Answer(tuple(blocks)))
            case ev.DropBlock():
                self._system.check_dropped(self.core, instruction.block)
                self._staged.pop(instruction.block, None)
            case ev.WriteEpochs():
                self._system.write_epochs(instruction, self.life)
            case ev.MovePart():
                self._system.later(lambda: self._copied(instruction), 0.1, 3.0)
            case ev.UsePart():
                parts = self._staged[instruction.block]
                node = self._copies[instruction.move]
                parts[instruction.part] = replace(parts[instruction.part], task=instruction.task, node=node)
            case ev.ReplaceWorker():
                self._report(self._system.replaced(instruction))
            case ev.ReleaseWorker():
                self._report(cluster.WorkerDone(instruction.worker))
            case ev.RemoveConsumer() | ev.Refuse():
                call = self._calls.get(instruction.consumer)
                if call is not None and call[0] == instruction.session:
                    self._answer(instruction.consumer, Answer(expelled=True))

    def _delivered(self, number: int) -> Delivered:
        staged_as = self.core.window.staged_as(number)
        block, parts = self.core.window.blocks[staged_as], self._staged.get(staged_as, {})
        shuffle = self.core.epochs.shuffle_of(number)
        if block.error is not None:
            return Delivered(number, shuffle, (), block.error)
        return Delivered(number, shuffle, tuple(part for _, part in sorted(parts.items())))

    def _copied(self, order: ev.MovePart) -> None:
        """Finish a copy, unless either node is gone or the copy fails; some are reported twice."""
        if not self._system.is_alive(self.life):
            return
        part = self._staged.get(order.block, {}).get(order.part)
        if part is None or not {part.node, order.node} <= self._system.nodes.keys() or self._system.rng.random() < 0.1:
            self.tell(ev.PartStays(order.move))
            return
        self._copies[order.move] = order.node
        self.tell(ev.PartMoved(order.move))
        if self._system.rng.random() < 0.1:
            self.tell(ev.PartMoved(order.move))

    def _make(self, order: ev.Prepare) -> None:
        def finish(node: str, ids: Ids) -> None:
            if not self._system.is_alive(self.life) or not self.core.tasks.has(order.task):
                return  # the coordinator died, or the worker was given up
            if self._system.storage_away_until > self._system.now:
                self.tell(ev.PutOff(order.task, "storage is away"))
            elif self._system.meets_bug():
                self.tell(ev.TaskFailed(order.task, "a bug"))
            elif order.block % self._system.order.blocks_per_epoch in self._system.bad_blocks:
                self.tell(ev.TaskEnded(order.task, BAD))
            else:
                node = self.core.tasks.workers[order.worker].node
                part = Part(order.part, order.task, node, self.life, ids)
                self._staged.setdefault(order.block, {})[order.part] = part
                self.tell(ev.TaskEnded(order.task, lacks=(self._system.seed + order.task) % 4 == 0))

        def fail(event: cluster.WorkerDied | cluster.WorkerBehind) -> None:
            if self._system.is_alive(self.life):
                self._report(event)

        self._system.prepare(order.worker, PartRequest(order.block, order.block_part, order.shuffle), finish, fail)


# ---- the whole system ----


class System(Cluster):
    """A random schedule of a whole feed; see the module docstring.

    Args:
        seed: determines everything.
        faults: moments at which one to three faults happen.

    Attributes:
        trials: name -> trial that lives or will live again.
        keeps_all: True if all epochs are identical and one epoch's blocks stay staged.
        written: how each epoch is shuffled; outlives the coordinator.
        bugs: errors that workers survived. Until `buggy_until`, some parts end in one.
        bad_blocks: numbers within an epoch of the blocks that contain a bad sample now.
        ever_bad: numbers of the blocks that ever contained one.
    """

    service: Service

    def __init__(self, seed: int, faults: int = 4) -> None:
        super().__init__(seed, faults)
        rng = self.rng
        # A separate generator, so that other seeds keep their schedules.
        self.keeps_all = random.Random(f"keeps all {seed}").random() < KEEPING
        self.joins_now = random.Random(f"joins now {seed}").random() < 0.6
        if self.keeps_all:
            self.order = Order(self.order.num_samples, 0, BLOCK_SAMPLES, shuffled=False)
        ahead_blocks = rng.randint(2, 6)
        if self.joins_now and not self.keeps_all:
            # A trial starts mid-epoch only if an epoch is longer than the blocks prepared ahead.
            blocks = random.Random(f"blocks {seed}").choice([6, 9])
            self.order, ahead_blocks = Order(blocks * BLOCK_SAMPLES - 1, 0, BLOCK_SAMPLES), 2
        self.limits = StagingLimits(
            budget_bytes=max(rng.choice([30, 40, 60, 100]), 10 * self.order.blocks_per_epoch * self.keeps_all),
            ahead_blocks=ahead_blocks,
            timeouts=TIMEOUTS,
            slack_blocks=drawn_slack(seed),
        )
        self.sessions = itertools.count(1)
        self.written: dict[int, Shuffle] = {}
        self._pages: dict[tuple[int, int], Mapping[int, Shuffle]] = {}  # pages of each life that are not yet written
        self.trials: dict[str, Trial] = {}
        self.storage_away_until = self.buggy_until = 0.0
        self.bugs = 0
        self.bad_blocks: set[int] = set()
        self.ever_bad: set[int] = set()
        self._network_is_bad = rng.random() < 0.6
        self._open_calls: list[Reply] = []
        self.lives = itertools.count()
        self._names = itertools.count()
        self._tells_paces = random.Random(f"paces {seed}")
        self._tells_often = self._tells_paces.choice([0.0, 0.5])

    def paces(self) -> ev.PacesMeasured | None:
        """Paces as a coordinator measures them now and then, with some noise; None if not measured."""
        if self._tells_paces.random() >= self._tells_often:
            return None
        steps_s = {name: trial.step_s * self._tells_paces.uniform(0.95, 1.05) for name, trial in self.trials.items()}
        paces = tuple(ev.TrialPace((name,), 1 / step_s) for name, step_s in steps_s.items())
        return ev.PacesMeasured(paces, self._tells_paces.choice([0.4, 2.0, 20.0]))

    def block_bytes(self, block: int) -> int:
        """Ten bytes, or less for an epoch's last block."""
        first, end = self.order.span(block)
        return 10 * (end - first) // BLOCK_SAMPLES

    # ---- the network ----

    def call(self, trial: Trial, request: Callable[[Service, Reply], object], take: Callable[[Answer], None]) -> None:
        """Call the coordinator. The trial, if alive, gets exactly one answer."""
        answered, process = False, trial.process

        def answer(what: Answer, least_s: float = 0.0, most_s: float = 0.2) -> None:
            def arrive() -> None:
                nonlocal answered
                if not answered:
                    answered = True
                    take(what)

            trial.later(arrive, least_s, most_s, process)

        def reach() -> None:
            if self.is_down:
                answer(Answer(restarting=True), 0.1, 2.0)
            else:
                self._open_calls.append(lambda what: None if answered else answer(what))
                request(self.service, answer)

        luck = self.rng.random() if self._network_is_bad and not self.is_peaceful else 1.0
        if luck > 0.03:
            self.later(reach, 0.0, 0.1)
        if luck < 0.06:  # lost or late; if it arrived before, it arrives twice
            self.later(reach, 1.0, 20.0) if luck > 0.01 else None
            answer(Answer(lost=True), CALL_S, CALL_S)

    # ---- the coordinator ----

    def open_service(self) -> Service:
        return Service(self)

    def kill_coordinator(self) -> None:
        was_down = self.is_down
        super().kill_coordinator()
        if not was_down:  # open calls get `restarting`
            calls, self._open_calls = self._open_calls, []
            for reply in calls:
                reply(Answer(restarting=True))

    def is_alive(self, life: int) -> bool:
        """Return whether the coordinator with this life number is alive."""
        return not self.is_down and self.service.life == life

    def write_epochs(self, order: ev.WriteEpochs, life: int) -> None:
        """Persist after a delay how epochs are shuffled, as a coordinator does. The newest order for a page wins."""
        self._pages[life, order.page] = order.shuffles

        def write() -> None:
            shuffles = self._pages.pop((life, order.page), None)
            if shuffles is None or not self.is_alive(life):
                return
            kept = {number: how for number, how in self.written.items() if number // PAGE_EPOCHS != order.page}
            self.written = {**kept, **shuffles}
            self.service.tell(ev.EpochsWritten(tuple(shuffles)))

        self.later(write, 0.0, 0.25)

    # ---- promises ----

    def check_samples(self, trial: Trial, number: int, block: Delivered) -> None:
        """Check that the parts together contain each sample of the block once."""
        ids = sorted(i for part in block.parts for i in part.ids.tolist())
        due = sorted(self.order.sample_ids(number, block.shuffle).tolist())
        assert ids == due, f"{trial.name} read samples {ids} of block {number}, which has {due}"

    def check_dropped(self, core: StagingState, block: int) -> None:
        """Check that no block held by a trial is dropped: its bytes would be granted twice.

        Exception: the block's node died and preparing it again failed. Its bytes were lost with the node.
        """
        for trial in self.trials.values():
            if trial.joined:
                end, member = trial.end, core.consumers.by_name.get(trial.name)
                if member is not None and member.session == end.session and block in end.holds:
                    story = "\n".join(core.stories.lines(f"block {block}"))
                    _, _, since = story.partition("its node is gone")
                    assert "-> FAILED" in since, f"block {block} is dropped, and {trial.name} looks at it"

    def check_error(self, trial: Trial, number: int, error: str) -> None:
        """Check that an error has a cause: a bad sample, dead workers, or errors in workers."""
        if error == BAD:
            assert number % self.order.blocks_per_epoch in self.ever_bad, f"block {number} has no bad sample"
        elif "a bug" in error:
            assert self.bugs >= self.limits.max_deaths, f"{trial.name} hears of block {number}: {error}"
        else:
            assert self.worker_deaths >= self.limits.max_deaths, f"{trial.name} hears of block {number}: {error}"

    # ---- faults ----

    def add_trial(self) -> None:
        if len(self.trials) >= 3 or not self.nodes:
            return
        rng = self.rng
        name = f"trial-{next(self._names)}"
        trial = Trial(
            self, name, rng.choice(sorted(self.nodes)), step_s=rng.choice([0.5, 2.0, 4.0]), keeps=rng.choice([0, 0, 1])
        )
        others = random.Random(f"{name} of {self.seed}")  # a separate generator, so that other draws stay the same
        trial.tests_s = others.choice([0.0, 0.0, 5.0, 20.0])
        if others.random() < 0.2:
            trial.keeps = 6
        self.trials[name] = trial
        if rng.random() < 0.3 and not self.is_down:
            self.service.tell(ev.Announce(name, others.choice((0, 0, 1, 3))))
        luck, far = rng.random(), rng.randint(0, 2 * self.order.blocks_per_epoch)
        if luck < 0.2 and far:
            first = far - far % self.order.blocks_per_epoch
            if far == first:
                trial.saved = Checkpoint((), far)
            else:
                taken, end = tuple(range(first, far)), first + self.order.blocks_per_epoch
                shuffle = Shuffle(first // self.order.blocks_per_epoch)
                samples = tuple(tuple(self.order.sample_ids(block, shuffle).tolist()) for block in taken)
                resumed = Resumption(far, OwnEpoch(first, end), shuffle.epoch, shuffle)
                trial.saved = Checkpoint(taken, end, samples, resumed)
        self.later(trial.restore, 0.0, 5.0)

    def _some_trial(self) -> Trial | None:
        up = [trial for _, trial in sorted(self.trials.items()) if trial.is_up]
        return self.rng.choice(up) if up else None

    def kill_trial(self) -> None:
        """The trial restarts from its checkpoint, or never returns."""
        if (trial := self._some_trial()) is not None:
            trial.die()
            self._replace(trial)

    def _replace(self, trial: Trial) -> None:
        if self.rng.random() < 0.3:
            del self.trials[trial.name]
        else:
            process = trial.process
            self.later(lambda: trial.restore() if trial.process == process else None, 0.1, 30.0)

    def pause_trial(self) -> None:
        if (trial := self._some_trial()) is not None:
            trial.paused_until = self.now + self.rng.choice([3.0, 12.0, 40.0])

    def end_trial(self) -> None:
        """The trial leaves, possibly with successors announced."""
        if (trial := self._some_trial()) is not None and not self.is_down:
            del self.trials[trial.name]
            successors, session = self.rng.choice((0, 0, 1, 3)), trial.end.session
            trial.die()
            if session:
                self.service.tell(ev.Leave(trial.name, session, successors))

    def kill_node(self, node: str | None = None) -> None:
        before = set(self.nodes)
        super().kill_node(node)
        for node in before - self.nodes.keys():
            for _, trial in sorted(self.trials.items()):
                if trial.node == node and trial.is_up:
                    trial.die()
                    trial.node = min(self.nodes, default="node-0")
                    self._replace(trial)

    def cut_storage(self) -> None:
        self.storage_away_until = self.now + self.rng.choice([2.0, 20.0])

    def break_program(self) -> None:
        """For a while, half of the parts end in an error."""
        self.buggy_until = self.now + self.rng.choice([2.0, 20.0])

    def meets_bug(self) -> bool:
        """Return whether a worker hits a bug now."""
        met = self.buggy_until > self.now and self.rng.random() < 0.5
        self.bugs += met
        return met

    def replaced(self, instruction: ev.ReplaceWorker) -> cluster.WorkerDied:
        """Check that a replaced worker hung, or failed repeatedly."""
        if instruction.blame:
            self.check_stuck(instruction.worker, instruction.reason)
        else:
            assert self.bugs >= WORKER_FAILURES, f"{instruction.worker} met no errors: {instruction.reason}"
        return cluster.WorkerDied(instruction.worker, instruction.reason, instruction.blame)

    def break_sample(self) -> None:
        """A sample turns bad and is repaired after a while."""
        block = self.rng.randrange(self.order.blocks_per_epoch)
        self.bad_blocks.add(block)
        self.ever_bad.add(block)
        self.later(lambda: self.bad_blocks.discard(block), 1.0, 20.0)

    # ---- the schedule ----

    def run(self) -> None:
        try:
            self._begin(cluster.Begin())
            for _ in range(self.rng.randint(1, 2)):
                self.add_trial()
            self.advance(8.0)
            for _ in range(self.faults):
                for _ in range(self.rng.choice([1, 1, 2, 3])):
                    getattr(self, self.rng.choice(FAULTS))()
                self.advance(self.rng.choice([0.0, 0.1, 1.0, 4.0, 12.0]))
            self._check_progress()
        except AssertionError as error:
            lines = "\n".join(map(str, self.story))
            raise AssertionError(f"seed {self.seed} at {self.now:.1f} s: {error}\n{lines}") from error

    def _check_progress(self) -> None:
        self.make_peace()
        self.storage_away_until = self.buggy_until = 0.0
        for trial in self.trials.values():
            trial.due = trial.steps + self.rng.randint(1, self.order.blocks_per_epoch + 1)
        end = self.now + PEACE_S
        while self.now < end and (self._late() or not self.is_whole()):
            self.advance(5.0)
            self.look()
        assert not (late := self._late()), f"{late} make no progress: {[self._why(name) for name in late]}"
        assert self.is_whole(), "workers are missing, have homes without room, or run unknown to the supervisor"

    def _late(self) -> list[str]:
        return [name for name, trial in self.trials.items() if trial.steps < trial.due]

    def _why(self, name: str) -> str:
        trial = self.trials[name]
        why = explain.wait(self.service.core, name)
        return f"{name} at {trial.cursor}, up {trial.is_up}, joined {trial.joined}, busy {trial.busy}: {why}"


FAULTS: tuple[str, ...] = (
    *cluster_schedules.FAULTS,
    "add_trial",
    "add_trial",
    "kill_trial",
    "kill_trial",
    "pause_trial",
    "pause_trial",
    "end_trial",
    "cut_storage",
    "break_sample",
    "break_program",
)


def run_some(seeds: Iterable[int], faults: int = 4) -> None:
    """Run a schedule for each seed.

    Raises:
        AssertionError: at the first broken promise.
    """
    for seed in seeds:
        System(seed, faults).run()
