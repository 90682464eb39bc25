"""Faults of a run on several nodes are found, and the table shows all figures."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.nodes.report import Loading, NodesReport, NodesResult, NodesSettings, tables
from mbaas.base.units import WANTED_BYTES_PER_S
from mbaas.errors import ConfigError
from mbaas.tools.bench.report import Machine

MB = 1_000_000

SHARING = Loading(
    epoch_s=(5.0, 2.0, 3.0, 4.0),
    storage_bytes=(100 * MB, 40 * MB, 40 * MB, 40 * MB),
    fastest_bytes_per_s=6.1 * MB,
    remote_bytes=(4 * MB, 0, 0, 0),
    prepared_bytes=150.0 * MB,
    cached_bytes=(29 * MB, 30 * MB),
    missing=0,
    repeated=0,
)
ALONE = replace(SHARING, epoch_s=(17.0, 8.0, 8.0, 8.0), remote_bytes=(0,) * 4, prepared_bytes=300.0 * MB)
RESULT = NodesResult(
    nodes=2,
    cache_share=0.6,
    cache_bytes=30 * MB,
    dataset_bytes=100 * MB,
    sample_bytes=150_544,
    samples=1000,
    limit_bytes_per_s=6.0 * MB,
    measured_bytes_per_s=5.9 * MB,
    sharing=SHARING,
    alone=ALONE,
    spilled_bytes=0,
    remade=0,
)


def test_a_sound_result() -> None:
    """41 MB are due after the first epoch and 40 MB were read, a difference of 1 % of 100 MB."""
    assert RESULT.faults == ()
    assert SHARING.later_epoch_s == 3.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"storage_bytes": (100 * MB, 40 * MB, 42_100_000, 41 * MB)}, "epoch 3 read 42.10 MB from storage, 41.00 MB"),
        ({"storage_bytes": (102 * MB, 41 * MB, 41 * MB, 41 * MB)}, "epoch 1 read 102.00 MB"),
        ({"cached_bytes": (28_800_000, 30_400_000)}, "28.80 to 30.40 MB, which differs by more than 5 %"),
        ({"cached_bytes": (59 * MB,)}, "1 of 2 nodes have a cache"),
        ({"remote_bytes": (0, 6 * MB, 0, 0)}, "6.00 raw MB crossed nodes in epoch 2"),
        ({"fastest_bytes_per_s": 6.4 * MB}, "storage delivered 6.40 MB/s to a node for two seconds"),
        ({"missing": 3}, "3 samples were missing, 0 were repeated"),
        ({"repeated": 2}, "0 samples were missing, 2 were repeated"),
    ],
)
def test_faults_of_sharing(wrong: dict[str, Any], said: str) -> None:
    result = replace(RESULT, sharing=replace(SHARING, **wrong))
    assert len(result.faults) == 1
    assert said in result.faults[0]
    assert not NodesReport(NodesSettings(), Machine(), (RESULT, result)).is_sound


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"measured_bytes_per_s": 5.6 * MB}, "storage delivered 5.60 MB/s instead of 6.00 MB/s"),
        ({"alone": replace(ALONE, missing=1)}, "alone: 1 samples were missing"),
        ({"remade": 1}, "1 parts of blocks were made more than once"),
        ({"spilled_bytes": 5 * MB}, "wrote 5 MB to disk"),
    ],
)
def test_other_faults(wrong: dict[str, Any], said: str) -> None:
    (fault,) = replace(RESULT, **wrong).faults
    assert said in fault


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nodes": ()}, "nodes must be at least 1, got 0"),
        ({"epochs": 1}, "epochs must be at least 2, got 1"),
        ({"storage_bytes_per_s": 0.0}, "got 0"),
        ({"cache_shares": (0.5, 1.5)}, "from 0 to 1, got 0.5, 1.5"),
        ({"cache_shares": ()}, "got nothing"),
    ],
)
def test_settings_check_themselves(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NodesSettings(**wrong)


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("8 apples", f"--storage must be {WANTED_BYTES_PER_S}, got '8 apples'"),
        ("-8 MB/s", f"--storage must be {WANTED_BYTES_PER_S}, got '-8 MB/s'"),
        ("0 MB/s", "storage_bytes_per_s must be above 0, got 0"),
    ],
)
def test_what_storage_gives_is_a_rate(storage: str, said: str) -> None:
    done = CliRunner().invoke(app, ["nodes", "--storage", storage])
    assert said in " ".join(done.stderr.split())


def shown(what: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(what)
    return out.getvalue()


def test_the_table_of_nodes() -> None:
    bad = replace(RESULT, spilled_bytes=5 * MB)
    settings = NodesSettings(nodes=(2,), cache_shares=(0.6,))
    text = shown(tables(NodesReport(settings, Machine(cpu="Abacus 3000"), (bad,))))
    told = ("Abacus 3000", "8 MB/s;", "hold 60%", "wrote 5 MB")
    for figure in (*told, "5.0 s", "3.0 s", "17.0 s", "29.0-30.0", "4.0", "300.0"):
        assert figure in text, figure
