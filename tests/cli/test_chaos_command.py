"""``mbaas chaos`` passes its options to the run, shows the report and exits accordingly; the run itself is faked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from mbaas.cli import app
from mbaas.tools.chaos import runner
from mbaas.tools.chaos.checker import Flaw
from mbaas.tools.chaos.plan import KINDS, OF_LINKS, OF_OUR_SEARCH
from mbaas.tools.chaos.report import Checked, KindReport, Report
from mbaas.tools.chaos.runner import ChaosSettings
from mbaas.tools.chaos.usage import Growth

FOUND = Checked(trials=3, minibatches=63, samples=2003, epochs=3, incarnations=5, is_independent=True, errors={"E": 1})
SOUND = Report(
    seed=4,
    seconds=121.0,
    kinds={"kill-worker": KindReport(4, 2, (0.25, 1.25)), "cut-link": KindReport(1, 0)},
    checked=FOUND,
    growth=(Growth("memory_bytes", 2e9, 1.5e9, -3e6),),
)
BAD = replace(
    SOUND,
    checked=replace(FOUND, flaws=(Flaw("missing", "trial-1", 2, (7, 8)), Flaw("different", "trial-1", 3, (9,)))),
    kept="/tmp/chaos-x",
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ChaosSettings]:
    """Settings of the requested runs; the report of each is sound, or bad with seed 13."""
    asked: list[ChaosSettings] = []

    def run(settings: ChaosSettings, say: Any) -> Report:
        asked.append(settings)
        return BAD if settings.seed == 13 else SOUND

    monkeypatch.setattr(runner, "run", run)
    return asked


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["chaos", *arguments], env={"COLUMNS": "100"})


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([], ChaosSettings()),
        (["--minutes", "10", "--every", "4"], ChaosSettings(faults=150, every_s=4.0)),
        (["--kinds", "kill-*, cut-link"], ChaosSettings(kinds=("kill-*", "cut-link"))),
        (
            ["--faults", "3", "--", "python", "x.py", "--seed", "9"],
            ChaosSettings(faults=3, command=("python", "x.py", "--seed", "9")),
        ),
    ],
)
def test_options_become_settings(asked: list[ChaosSettings], arguments: list[str], settings: ChaosSettings) -> None:
    assert call(*arguments).exit_code == 0
    assert asked == [settings]


def test_a_sound_run_is_a_table_and_exit_code_0(asked: list[ChaosSettings]) -> None:
    done = call()
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert ["kill-worker", "4", "2", "750", "ms", "1.25", "s"] in rows
    assert ["cut-link", "1", "0"] in rows
    assert ["all", "5", "2"] in rows
    assert ["memory", "2", "GB", "1.5", "GB", "-3", "MB"] in rows
    text = " ".join(done.output.split())  # lines wrap without a terminal
    assert "2,003 samples in 3 epochs of 3 trials in 5 processes, compared with a run without faults" in text
    assert "0 missing, 0 repeated, 0 different, 0 misplaced, 0 unknown" in text


def test_a_run_that_missed_samples_names_them_and_ends_with_1(asked: list[ChaosSettings]) -> None:
    done = call("--seed", "13")
    assert done.exit_code == 1
    assert "2 missing, 0 repeated, 1 different" in done.output
    assert "trial-1, epoch 2: 2 samples missing: 7, 8" in done.output
    assert "records and logs are in /tmp/chaos-x" in done.output


def test_json_has_counts_and_verdict(asked: list[ChaosSettings]) -> None:
    done = call("--seed", "13", "--json")
    told = json.loads(done.stdout)
    assert (told["missing"], told["different"], told["happened"], told["is_sound"]) == (2, 1, 2, False)
    assert told["kinds"]["kill-worker"] == {"planned": 4, "happened": 2, "waits_s": [0.25, 1.25]}
    assert done.exit_code == 1


def test_what_cannot_happen_is_left_out_of_the_plan_and_refused_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "why_not", lambda: "iproute2 is not installed")
    kinds = {fault.kind for fault in ChaosSettings(faults=200, command=("x",)).plan()}
    assert len(kinds) == len(KINDS) - len(OF_LINKS) - len(OF_OUR_SEARCH)
    for arguments, sentence in (
        (
            ["--kinds", "*-link"],
            "has cut-link and slow-link, which cannot happen here: iproute2 is not installed",
        ),
        (["--kinds", "err-storage", "x"], "--kinds has err-storage, which cannot happen here: a program serves a"),
    ):
        done = call(*arguments)
        assert done.exit_code == 2
        assert sentence in " ".join(done.output.split())
