"""Repetition of a measurement until its interval is small enough, progress, and results saved after each stage."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mbaas.base.units import duration
from mbaas.model.quantity import Quantity, measured


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Accuracy target and limits of a measurement.

    Attributes:
        spread: sufficient half-width of the interval, as a share of the value.
        least, most: minimum and maximum number of measurements. With fewer than six, an interval only spans their range
            (`measured`).
        budget_s: time after which no measurement starts, once there are `least`.
        window_s: target seconds of one measurement of a rate.
        is_whole: whether to measure the costs of feeds, and rates for every number of workers, threads and readers. If
            False, rates are measured only for the smallest number and for a feed's default.
    """

    spread: float = 0.02
    least: int = 6
    most: int = 30
    budget_s: float = 6.0
    window_s: float = 0.25
    is_whole: bool = True


QUICK = Effort(spread=0.1, least=2, most=4, budget_s=0.5, window_s=0.1, is_whole=False)
"""Effort for a first answer: rates within about 10 %."""


def repeat(
    measure: Callable[[], float], effort: Effort, *, unit: str, clock: Callable[[], float] = time.monotonic
) -> Quantity:
    """Repeat a measurement until it is accurate enough; return the median with its interval.

    The first measurement is discarded: it loads code, fills caches, and gives windows a first estimate of the rate.
    """
    measure()
    values: list[float] = []
    began = clock()
    while len(values) < effort.least or (
        len(values) < effort.most
        and clock() - began < effort.budget_s
        and measured(values, unit=unit).spread > effort.spread
    ):
        values.append(measure())
    return measured(values, unit=unit)


class Progress:
    """Reports each phase as it begins, with the time passed and the time left.

    The time left is the expected time of the remaining phases. It never increases: on a slow machine it falls more
    slowly.

    Args:
        expected_s: phase -> seconds, in order; a phase may begin several times, or never.
        tell: called with each line.
    """

    def __init__(
        self, expected_s: Mapping[str, float], tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected_s, self._tell, self._clock = dict(expected_s), tell, clock
        self._began = clock()
        self._left_s = sum(self._expected_s.values())

    def begin(self, phase: str, text: str, *, done: float = 0.0) -> None:
        """Report the present activity; ``done`` is the finished share of its phase, from 0 to 1."""
        phases = list(self._expected_s)
        now = phases.index(phase)
        left_s = sum(self._expected_s[name] for name in phases[now:]) - done * self._expected_s[phase]
        self._left_s = min(self._left_s, left_s)
        gone_s = self._clock() - self._began
        self._tell(f"{text} ({duration(gone_s)} gone, about {duration(self._left_s)} to go)")

    def found(self, text: str) -> None:
        """Report a result, so that it is visible even if the analysis is stopped."""
        self._tell(f"  {text}")


Result = TypeVar("Result")

MOST_AGE_S = 24 * 3600
"""Age from which results are measured again: the machine may have changed."""


class _File(msgspec.Struct):
    about: str
    stages: dict[str, Any]


class SavedStages:
    """Results by stage, in a file that is replaced after each stage.

    Args:
        path: the file; None, also after a failed attempt to write it, saves nothing.
        about: everything that the results depend on. A file about something else is ignored, and overwritten.

    Attributes:
        earlier: stages that an earlier, interrupted analysis has saved.
    """

    def __init__(self, path: Path | None = None, *, about: str = "") -> None:
        self.path, self._file = path, _File(about, {})
        if path is not None:
            with suppress(OSError, msgspec.MsgspecError):
                found = msgspec.json.decode(path.read_bytes(), type=_File)
                if found.about == about and time.time() - path.stat().st_mtime < MOST_AGE_S:
                    self._file = found
        self.earlier = tuple(self._file.stages)

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(self._file.stages)

    def result(self, stage: str, kind: Any, measure: Callable[[], Result]) -> Result:
        """Return the saved result of a stage, of type ``kind``, or measure and save it."""
        if stage in self._file.stages:
            saved: Result = msgspec.convert(self._file.stages[stage], kind)
            return saved
        measured = measure()
        self._file.stages[stage] = msgspec.to_builtins(measured)
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                written = self.path.with_suffix(".tmp")
                written.write_bytes(msgspec.json.encode(self._file))
                written.replace(self.path)
            except OSError:  # no home folder, or a full disk: a measurement is worth more than its copy
                self.path = None
        return measured

    def end(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def saved_path(about: str) -> Path:
    """Return the file for the stages of an analysis, in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mbaas"
    return folder / f"analyze-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"
