"""Run of all targets, and its report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.fuzz.run import Fuzzed, fuzz
from benchmarks.fuzz.targets import TARGETS
from mbaas.errors import ConfigError

_CASES_OF_A_SEED = 1 << 40
"""Case numbers reserved for each seed; seed 0 has the cases of the test suite."""


def fuzz_all(
    seconds: float, *, seed: int, target: str | None, case: int | None, progress: Callable[[str], None]
) -> list[Fuzzed]:
    """Fuzz every target, or one, for an equal part of the time; with ``case`` only that case.

    Raises:
        ConfigError: an unknown target, or a case without a target.
    """
    if target is not None and target not in TARGETS:
        raise ConfigError(f"--target must be one of {', '.join(TARGETS)}, got {target!r}")
    if case is not None:
        if target is None:
            raise ConfigError("--case needs --target: each has cases of its own")
        return [fuzz(target, first=case, cases=1)]
    chosen = [target] if target is not None else list(TARGETS)
    done = []
    for name in chosen:
        done.append(fuzz(name, first=seed * _CASES_OF_A_SEED, seconds=seconds / len(chosen)))
        progress(f"{name}: {done[-1].cases:,} cases, {len(done[-1].failures)} findings")
    return done


def table(done: Sequence[Fuzzed]) -> Group:
    """Return a table of the runs, then each finding with the command that repeats it."""
    shown = Table("target", "cases", "cases/s", "findings")
    for each in done:
        rate = f"{each.cases / max(each.seconds, 1e-9):,.0f}"
        shown.add_row(each.target, f"{each.cases:,}", rate, str(len(each.failures)))
    told = [
        Text(
            f"\n{failure.kind}: python -m benchmarks fuzz --target {failure.target} --case {failure.case}\n"
            f"{failure.told.strip()}"
        )
        for each in done
        for failure in each.failures
    ]
    return Group(shown, *told)
