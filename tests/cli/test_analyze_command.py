"""`mbaas analyze` and `mbaas what-if` accept their options and explain invalid ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mbaas.base import files
from mbaas.cli import app
from mbaas.cli.analyze import AnalyzeRequest
from mbaas.errors import ConfigError
from mbaas.model.curves import MeasuredCurve
from mbaas.model.quantity import stated
from mbaas.model.rates import GpuRates, Rates, Setup

NOTHING = {
    "file": None,
    "feed": None,
    "step": None,
    "rate_per_s": None,
    "device": None,
    "trials": 1,
    "storage": None,
    "verify": False,
    "run": True,
    "quick": False,
    "address": None,
}


def per_s(rate: float) -> MeasuredCurve:
    return MeasuredCurve.linear(stated(rate, unit="samples/s"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """1,000 samples of 100 kB. A trial takes 1,000 samples/s, 4 workers prepare 800/s, storage delivers 250/s."""
    rates = Rates(
        samples=1000,
        sample_bytes=100_000,
        pixel_bytes=150_000,
        cores=4,
        batch_size=64,
        step=stated(1000, unit="samples/s"),
        prep=per_s(200),
        storage=per_s(250),
        cache=stated(1e9, unit="bytes/s"),
    )
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"rates": rates.to_json(), "setup": Setup().to_json()}))
    return file


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "give either a feed file"),
        ({"file": Path("a"), "feed": "b", "step": "m:f"}, "give either a feed file"),
        ({"file": Path("a")}, "give the speed of training"),
        ({"file": Path("a"), "step": "m:f", "rate_per_s": 1.0}, "give the speed of training"),
        ({"feed": "b", "verify": True}, "--feed uses the rates of a running feed"),
        ({"file": Path("a"), "step": "m:f", "trials": 0}, "--trials must be at least 1, got 0"),
        ({"file": Path("a"), "rate_per_s": 1.0, "quick": True, "verify": True}, "leave out --quick or --verify"),
        ({"feed": "train", "quick": True}, "leave out --quick or --feed"),
        ({"file": Path("a"), "step": "m:f", "storage": "fast"}, "--storage must be a rate .* got 'fast'"),
        ({"file": Path("a"), "step": "m:f", "storage": "0"}, "--storage must be a rate .* got '0'"),
        (
            {"file": Path("a"), "step": "m:f", "storage": "50"},
            "a unit: write '50 MB/s', or '50 B/s' for bytes, got '50'",
        ),
        ({"file": Path("a"), "step": "m:f", "storage": "5e7/s"}, "--storage must have a unit"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        AnalyzeRequest(**{**NOTHING, **given})


def test_options_that_do() -> None:
    request = AnalyzeRequest(**{**NOTHING, "file": Path("a"), "rate_per_s": 10.0, "storage": "50 MB"})
    assert (request.storage_bytes_per_s, request.rate_per_s) == (50_000_000, 10.0)
    other = AnalyzeRequest(**{**NOTHING, "file": Path("a"), "rate_per_s": 1.0, "storage": "50 B/s"})
    assert other.storage_bytes_per_s == 50


def test_a_folder_that_is_not_there_is_noticed_before_anything_is_measured(tmp_path: Path) -> None:
    code, _, errors = run("analyze", tmp_path / "f.yaml", "--rate", 5, "--report", tmp_path / "none" / "r.html")
    assert code == 2
    assert "none/r.html does not exist" in errors


def test_a_disk_tier_without_a_size(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"name: f\ndata: {tmp_path}\nbatch_size: 4\npipeline: [DecodeImage]\ndisk: {{path: {tmp_path}}}\n")
    code, _, errors = run("analyze", file, "--rate", 5)
    assert code == 2
    assert "f.yaml:5: disk lacks 'max_bytes'" in " ".join(errors.split())


def test_what_if_answers_in_words(saved: Path) -> None:
    """Storage limits the rate to 250/s, 4 s per epoch. With all 100 MB cached, prep limits it to 800/s, 1.25 s."""
    code, text, _ = run("what-if", saved, "--set", "cache_bytes=100MB")
    words = " ".join(text.split())
    assert code == 0
    assert "an epoch takes 1.25 s" in words
    assert "epoch 4 s 1.25 s" in words
    assert "limit storage" in words


def test_what_if_says_what_decoded_samples_are_worth(saved: Path) -> None:
    """Decoded samples are ten times as fast and take 500 MB in all.

    Storage takes 4 ms per sample, so 10 MB are better used for encoded samples.
    """
    plain = json.loads(saved.read_text())
    plain["rates"] |= {"decoded_bytes": 500_000, "decoded_prep": per_s(2000).to_json()}
    saved.write_text(json.dumps(plain))
    code, text, _ = run("what-if", saved, "--set", "cache_bytes=500MB", "--set", "accelerator_factor=100")
    assert code == 0
    assert "· decoding is 90 % of prep, and all samples are kept decoded" in " ".join(text.split())
    assert "an epoch takes 125 ms" in " ".join(text.split())
    code, text, _ = run("what-if", saved, "--set", "decoded=off", "--set", "cache_bytes=500MB", "--json")
    answer = json.loads(text)
    assert answer["after"]["steady"]["epoch_s"]["value"] == pytest.approx(1.25)
    assert (answer["decoding"]["whole_bytes"], answer["decoding"]["decoded"]) == (500_000_000, 0)
    code, text, _ = run("what-if", saved, "--set", "cache_bytes=10MB")
    assert "· no decoded samples are kept, because one is as large as 5 encoded ones" in " ".join(text.split())


def test_what_if_answers_programs(saved: Path) -> None:
    code, text, _ = run(
        "what-if", saved, "--set", "trials=4", "--set", "sharing=off", "--curve", "cache_bytes=0,50MB,100MB", "--json"
    )
    answer = json.loads(text)
    assert code == 0
    assert answer["before"]["steady"]["limit"] == "storage"
    assert answer["after"]["setup"]["trials"] == 4
    assert answer["after"]["steady"]["trial_per_s"]["value"] == pytest.approx(62.5)  # each reads 250 / 4
    assert [value for value, _ in answer["curve"]["points"]] == [0, 5e7, 1e8]
    assert answer["curve"]["parameter"] == "cache_bytes"


def test_the_cheapest_machine_comes_first(saved: Path, tmp_path: Path) -> None:
    """10 epochs. Small: 4 s each at 250/s from storage, 40 s at 1.0 per hour.

    Large: everything is cached, 4 s and then 9 times about 0.5 s, at 3.0 per hour.
    """
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        "small: {price_per_h: 1.0, cores: 4}\nlarge: {price_per_h: 3.0, cores: 8, cache_bytes: 100 MB, most: 2}\n"
    )
    code, text, _ = run("what-if", saved, "--machines", prices, "--epochs", 10, "--json")
    offers = json.loads(text)["machines"]
    assert code == 0
    assert len(offers) == 3
    assert offers == sorted(offers, key=lambda offer: offer["cost"]["value"])
    small = next(offer for offer in offers if offer["machine"] == "small")
    assert small["cost"]["value"] == pytest.approx(40 / 3600)


GPU = "gpus: 2\nlink_bytes_per_s: 10 GB/s\ndecode: {per_s: 2000, step_per_s: %s, cpu_s: 0.1 ms, memory_bytes: 3 GB}\n"


def answer_of(file: Path) -> dict[str, float]:
    """The rates of decoding on a GPU in a file, as plain numbers."""
    said = files.read(file).to(GpuRates).decode
    assert said is not None
    return vars(said)


def test_where_samples_cross_to_the_gpu(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpu.yaml"
    file.write_text(GPU % 10)
    code, text, _ = run("what-if", saved, "--gpu", file, "--set", "cpu_price_per_h=0.5", "--json")
    answer = json.loads(text)
    assert code == 0
    assert answer["gpu"]["shares"].keys() == {"normalize", "decode"}
    assert answer["gpu"]["options"]["engine"] in ("cpu", "dali")
    assert answer["costs"]["price"]["value"] == pytest.approx(answer["costs"]["cpu_s"]["value"] / 7200)
    code, text, _ = run("what-if", saved, "--gpu", file)
    assert re.search(r"(prepares?|the others) .*\(engine: (cpu|dali.*)\): each trial gets", " ".join(text.split()))
    kept = json.loads(saved.read_text())
    kept["rates"]["on_gpu"] = {"gpus": 2, "decode": answer_of(file), "resize": None}
    again = tmp_path / "on_gpu.json"
    again.write_text(json.dumps(kept))
    code, text, _ = run("what-if", again, "--json")
    assert (code, json.loads(text)["gpu"]["prep_gpus"]) == (0, answer["gpu"]["prep_gpus"])
    file.write_text(GPU % 1_000_000)
    code, _, errors = run("what-if", saved, "--gpu", file)
    assert code != 0
    assert "gpu.yaml:3" in errors
    assert "step_per_s of decode must be at most the step's rate" in " ".join(errors.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "cpu_price_per_h=-1"], "cpu_price_per_h must be 0 or more and finite, got -1"),
        (["--set", "cach_bytes=1"], "unknown name 'cach_bytes'; did you mean 'cache_bytes'?"),
        (["--set", "trials=two"], "trials must be a whole number, got 'two'"),
        (["--set", "trials=0"], "trials must be at least 1, got 0"),
        (["--set", "sharing=maybe"], "sharing must be true or false, got 'maybe'"),
        (["--set", "cache_bytes=much"], "cache_bytes must be a size"),
        (["--curve", "sharing=1,2"], "unknown name 'sharing'"),
        (["--machines", "none.yaml"], "none.yaml"),
    ],
)
def test_questions_that_cannot_be_answered(saved: Path, arguments: list[str], sentence: str) -> None:
    code, _, errors = run("what-if", saved, *arguments)
    assert code != 0
    assert sentence in errors


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{}", "a.json must be a file written by `mbaas analyze --save`, it lacks 'rates' and 'setup'"),
        ("[]", "a.json: the file must hold a JSON object, got a list"),
        ('{"rates":\n no JSON', "a.json:2: not valid JSON: Expecting value at column 2"),
        ("", "a.json:1: not valid JSON: Expecting value at column 1"),
        (
            '{"setup": {}, "rates": {"samples": 1}}',
            "a.json must be a file written by `mbaas analyze --save`: rates lack 'sample_bytes' and 'pixel_bytes' and",
        ),
    ],
)
def test_a_file_that_is_no_analysis(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    code, _, errors = run("what-if", file)
    assert code != 0
    assert sentence in errors
    assert "a.json must be a file written by `mbaas analyze --save`" in errors
    assert "Error" not in errors


@pytest.mark.parametrize(
    ("prices", "sentence"),
    [
        ("m: {cores: 4}", "prices.yaml:1: m lacks 'price_per_h'"),
        ("m: {cores: 4, price_per_h: 1, core: 5}", "unknown key 'core'; did you mean 'cores'?"),
        ("m: {cores: 4, price_per_h: -1}", "m.price_per_h must be at least 0, got -1"),
        ("m: {cores: 4, price_per_h: 1, cache_bytes: x}", "cache_bytes must be a size"),
        ("m: {cores: many, price_per_h: 1}", "m.cores must be a whole number, got 'many'"),
    ],
)
def test_price_lists_that_cannot_work(saved: Path, tmp_path: Path, prices: str, sentence: str) -> None:
    (tmp_path / "prices.yaml").write_text(prices)
    code, _, errors = run("what-if", saved, "--machines", tmp_path / "prices.yaml")
    assert code != 0
    assert sentence in errors


def test_a_file_that_is_missing_is_not_said_to_be_wrong() -> None:
    code, _, said = run("what-if", "none.json")
    assert (code, said) == (2, "error: cannot read none.json: No such file or directory")
