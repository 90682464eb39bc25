"""The form in which a feed caches decoded samples, chosen for all pipelines in use. Pure.

Pipelines with the same first transforms can start from the same decoded samples. The longest common prefix serves all
of them. A longer prefix is smaller or saves more, but pipelines without it need the stored bytes. The form with the
shortest epoch for all pipelines together is chosen. Let U be the pipelines that can use a form, and x the shares from
`mbaas.model.forms.plan_forms`. In an epoch, one sample takes these seconds of each resource:

========  =====================================================================================
storage   (1 - x encoded - x decoded) storage_s, or (1 - x encoded) storage_s if not all are in U
CPUs      (sum of all encoded_s - x decoded (sum over U of encoded_s - decoded_s)) / threads
========  =====================================================================================

Pipelines share one read of a sample, but each prepares it. Caches must read samples again after a change, so a new
form must save some time, and be the best choice for a while: trials of a search come and go.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_costs

from msgspec.structs import replace

from mbaas.base.units import counted
from mbaas.model.forms import WORTHWHILE, FormPlan, plan_forms
from mbaas.samples.placement import ENCODED
from mbaas.wire.samples import DecodedCosts, DecodedSamples

STAY_S = 10.0
"""A form must be the best choice for this long before it is used."""

FEED_PIPELINE = ""
"""Name of the feed's own pipeline."""

Forms = tuple[DecodedCosts, ...]
"""The decoded forms of a pipeline, and their costs; see `mbaas.wire.samples.Probe`."""


class KeptForm:
    """The form in use, and the choice of another one.

    Args:
        first: the decoded samples of the feed's own pipeline.
        is_new: whether the cache nodes start in that form; otherwise their form is unknown.
    """

    def __init__(self, first: DecodedSamples, *, is_new: bool) -> None:
        self._first = first
        self.current: DecodedSamples | None = first if is_new else None
        self._wanted: DecodedSamples | None = None
        self._since = 0.0
        self._seen: object = None

    def look(
        self, now: float, pipelines: Mapping[str, Forms], *, samples: float, memory_bytes: float
    ) -> DecodedSamples | None:
        """Return the decoded samples that nodes should cache from now on, or None if nothing changes.

        Args:
            now: the current time in seconds.
            pipelines: name of each pipeline in use -> its decoded forms.
            samples, memory_bytes: number of samples on an average node, and its memory for them.
        """
        seen = frozenset(pipelines), round(samples), memory_bytes
        if seen != self._seen:
            self._seen = seen
            wanted = self._best(pipelines, samples, memory_bytes) if pipelines else self.current
            if wanted is None or self._wanted is None or wanted.form != self._wanted.form:
                self._since = now
            self._wanted = wanted
        if self._wanted is None or now - self._since < STAY_S or self._wanted == self.current:
            return None
        self.current = self._wanted
        return self.current

    def reason(self, pipelines: Mapping[str, Forms]) -> str:
        """Return a message about the form in use."""
        form = ENCODED if self.current is None else self.current.form
        applied = {n for forms in pipelines.values() for n, each in enumerate(forms, 1) if each.form == form}
        if not applied:
            return f"no decoded samples are kept from now on, for {counted(len(pipelines), 'pipeline')} together"
        users = sum(form in (each.form for each in forms) for forms in pipelines.values())
        whose = f"{users} of {counted(len(pipelines), 'pipeline')}"
        return f"decoded samples are kept after {counted(min(applied), 'transform')} from now on, which {whose} can use"

    def _best(self, pipelines: Mapping[str, Forms], samples: float, memory_bytes: float) -> DecodedSamples:
        if pipelines.keys() <= {FEED_PIPELINE}:
            return self._first
        forms = [*pipelines.values()]
        users = Counter(each.form for each in itertools.chain(*forms))
        shared = {form for form, count in users.items() if count > 1 or len(forms) == 1}

        def seconds(choice: DecodedSamples) -> tuple[float, float]:
            return self._seconds(choice, is_for_all=users[choice.form] == len(forms), room=(samples, memory_bytes))

        current = self._first if self.current is None else self.current
        best = self._choice(current.form, forms)
        busiest_s, total_s = seconds(best)
        for form in sorted({*shared, ENCODED} - {current.form}):
            choice = self._choice(form, forms)
            busiest, total = seconds(choice)
            is_shorter = busiest < (1 - WORTHWHILE) * busiest_s
            is_cheaper = busiest <= busiest_s and total < (1 - WORTHWHILE) * total_s
            if is_shorter or is_cheaper:
                best, busiest_s, total_s = choice, busiest, total
        if self.current is not None and best.form == self.current.form:
            now, before = (self._plan(each, samples, memory_bytes).decoded for each in (best, self.current))
            return best if abs(now - before) >= WORTHWHILE else self.current
        return best

    def _choice(self, form: int, pipelines: Sequence[Forms]) -> DecodedSamples:
        """Return a form with the costs of one sample for all pipelines together."""
        encoded_s = decoded_s = 0.0
        nbytes = []
        for forms in pipelines:
            alone_s = sum(each.sample_s for each in forms) / len(forms) if forms else self._first.costs.encoded_s
            encoded_s += alone_s
            found = next((each for each in forms if each.form == form), None)
            decoded_s += alone_s if found is None else min(alone_s, found.rest_s)
            nbytes += [] if found is None else [found.sample_bytes]
        costs = replace_costs(
            self._first.costs,
            encoded_s=encoded_s,
            decoded_s=decoded_s,
            decoded_bytes=sum(nbytes) / len(nbytes) if nbytes else self._first.costs.decoded_bytes,
        )
        return replace(self._first, form=form, costs=costs)

    def _plan(self, choice: DecodedSamples, samples: float, memory_bytes: float) -> FormPlan:
        return plan_forms(choice.costs, samples=samples, threads=choice.threads, memory_bytes=memory_bytes)

    def _seconds(self, choice: DecodedSamples, *, is_for_all: bool, room: tuple[float, float]) -> tuple[float, float]:
        """Return the seconds per sample of the busier resource, and of both together."""
        costs, plan = choice.costs, self._plan(choice, *room)
        unread = plan.kept if is_for_all else plan.memory_encoded
        storage_s = (1 - unread) * costs.storage_s
        cpu_s = (costs.all_encoded_s - plan.decoded * costs.saved_s) / choice.threads
        return max(storage_s, cpu_s), storage_s + cpu_s
