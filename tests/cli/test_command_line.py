"""Help is quick and shows the use of each command, and a wrong command line exits with 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from commandline import mbaas
from typer.main import get_command
from typer.testing import CliRunner

from mbaas.cli import app, bench, console
from mbaas.errors import MbaasError
from mbaas.tools.bench.report import BenchReport, Machine
from mbaas.tools.bench.rows import BenchSettings


@pytest.mark.parametrize("command", ["doctor", "init", "check", "serve", "status", "stop", "bench", "chaos"])
def test_each_command_shows_examples(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "Examples" in done.output
    assert f"mbaas {command}" in done.output.partition("Examples")[2]
    assert max(map(len, done.output.splitlines())) <= 80


def test_a_bar_estimates_the_time_that_is_left() -> None:
    with console.progress_bar("checking [a]") as show:
        assert show(0, 10, "0 of 10") is None
        assert show(2, 10, "2 of 10") is None, "nothing is known of the time that they took"
        assert show(5, 10, "5 of 10") is not None


def test_help_of_the_module() -> None:
    done = mbaas("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("serve", "status", "stop", "bench", "Examples"))
    assert mbaas("--version").stdout.startswith("mbaas 0.")


@pytest.mark.slow
def test_help_imports_nothing_heavy_and_a_feed_file_no_pandas() -> None:
    """Ray alone would double the time of help, and pandas that of a check's processes. The test checks the causes.

    pyarrow imports pandas when it first makes an array of Python objects.
    """
    program = (
        "import sys; from mbaas.cli import app\n"
        "def found(*names): return [name for name in names if name in sys.modules]\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit: print(found('ray', 'torch', 'pyarrow', 'numpy', 'yaml', 'cv2'))\n"
        "import mbaas.cli.feed_file\n"
        "print(found('pandas', 'ray', 'torch'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "No such command"),
        (["stop"], "Missing argument"),
        (["status", "--every", "0"], "Invalid value for"),
        (["status", "--address", "somewhere"], "must be host:port of its head, such as 10.0.0.1:6379, got 'somewhere'"),
        (["bench", "--trials", "one"], "--trials must be whole numbers with commas between, such as 1,4,8, got 'one'"),
        (["chaos", "--faults", "0"], "--faults must be at least 1, got 0"),
        (["chaos", "--faults", "3", "--minutes", "2"], "--faults 3 and --minutes 2 exclude each other"),
        (["chaos", "--minutes", "0"], "--minutes and --every must be above 0, got 0 and 6"),
        (["chaos", "--kinds", "kil-worker"], "did you mean 'kill-worker'?"),
        (["bench", "--rounds", "0"], "rounds must be at least 1, got 0"),
        (["bench", "--samples", "0"], "samples must be at least 1, got 0"),
        (["bench", "--images", "0"], "samples must be at least 1, got 0"),
        (["bench", "--task", "poems"], "task must be one of images, detection, audio, got poems"),
        (
            ["bench", "--task", "detection", "--data", "a.json"],
            "image_folder must name the folder of the images that a.json tells of, got nothing",
        ),
        (["bench", "--image-folder", "b"], "image_folder is for task detection, beside data, which names the file"),
        (["bench", "--batch", "0"], "batch must be at least 1, got 0"),
        (["bench", "--seconds", "-1"], "seconds must be at least 0 and finite, got -1.0"),
        (["bench", "--seconds", "nan"], "seconds must be at least 0 and finite, got nan"),
        (
            ["bench", "--rows", "prep,magic"],
            "ray-data, mbaas, mbaas-decoded, got magic",
        ),
        (
            ["bench", "--peers", "--task", "audio"],
            "task must be images where peers are run (tensorsocket, tf-data, ray-data), got audio",
        ),
        (
            ["bench", "--peers", "--peers-python", "/none"],
            "peers_python must be a Python interpreter, got /none, which",
        ),
    ],
)
def test_wrong_command_lines(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_commands_find_no_cluster_if_each_program_has_its_own() -> None:
    done = CliRunner().invoke(app, ["status"], env={"COLUMNS": "200", "RAY_ADDRESS": "local"})
    assert done.exit_code == 1
    assert 'RAY_ADDRESS is "local", which names no cluster; unset it' in done.stderr
    done = CliRunner().invoke(app, ["status", "--address", "local"], env={"COLUMNS": "200"})
    assert '--address is "local", which names no cluster; leave it out' in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *([f"--{name}", wrong] for name in ("rounds", "samples", "cores", "trials", "batch") for wrong in ("0", "-3")),
        *(["--seconds", wrong] for wrong in ("-1", "inf", "nan")),
        *(["--rows", wrong] for wrong in ("magic", "")),
        *([f"--{name}", wrong] for name in ("trials", "batch") for wrong in ("one", "1,,2", "")),
        *(["--task", task, "--data", "/no/such/folder"] for task in ("images", "audio")),
        ["--task", "detection", "--data", "/no/such/file.json", "--image-folder", "/no/such/folder"],
        ["--task", "detection", "--data", "/no/such/file.json"],
        ["--task", "detection", "--data", "/proc/version", "--image-folder", "/no/such/folder"],
        ["--task", "audio", "--data", "sounds", "--image-folder", "images"],
        ["--task", "poems"],
    ],
    ids=" ".join,
)
def test_what_bench_refuses_is_called_as_on_the_command_line(arguments: list[str]) -> None:
    """Each word of the sentence that looks like an option is a visible option of `mbaas bench`."""
    done = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code in (1, 2), done.stderr  # 1: a missing folder
    shown = {flag for option in get_command(app).commands["bench"].params if not option.hidden for flag in option.opts}
    looks_like_one = r"(?<![\w/])--[a-z][\w-]*|\b[a-z]+(?:_[a-z]+)+\b|\b[a-z]+(?= must)"
    named = re.findall(looks_like_one, done.stderr)
    assert named
    assert {f"--{name.removeprefix('--').replace('_', '-')}" for name in named} <= shown, done.stderr


def test_help_of_analyze_names_no_time_that_it_takes() -> None:
    """The time depends on the number of cores and on the measurements; the command estimates it in its first line."""
    done = CliRunner().invoke(app, ["analyze", "--help"], env={"COLUMNS": "200"})
    assert "Take fewer measurements" in done.output
    assert re.findall(r".*\b(?:minutes?|hours?|\d+ (?:s|min))\b.*", done.output) == []


def test_bench_without_its_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NEEDED", {"images": {}, "audio": {"no_such_module": "some-package"}})
    bench.check_installed("images")
    with pytest.raises(MbaasError, match=r"needs some-package: pip install some-package"):
        bench.check_installed("audio")
    assert "needs some-package" in CliRunner().invoke(app, ["bench", "--task", "audio"]).stderr


def test_bench_runs_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: BenchSettings, report: object) -> BenchReport:
        return BenchReport(settings, Machine(), 0, ())

    monkeypatch.setattr("mbaas.tools.bench.runner.run", run)
    done = CliRunner().invoke(app, ["bench", "--trials", "2,3", "--batch", "32", "--rows", "prep,mbaas", "--json"])
    assert done.exit_code == 0
    settings = json.loads(done.stdout)["settings"]
    assert (settings["trials"], settings["batch"], settings["rows"]) == ([2, 3], [32], ["prep", "mbaas"])
    assert (settings["task"], settings["data"], settings["image_folder"]) == ("images", None, None)
    own = ["--task", "detection", "--data", "coco.json", "--image-folder", "val"]
    settings = json.loads(CliRunner().invoke(app, ["bench", *own, "--json"]).stdout)["settings"]
    assert (settings["task"], settings["data"], settings["image_folder"]) == ("detection", "coco.json", "val")


def test_interrupted_work_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: BenchSettings, report: object) -> BenchReport:
        raise KeyboardInterrupt

    monkeypatch.setattr("mbaas.tools.bench.runner.run", run)
    done = CliRunner().invoke(app, ["bench"])
    assert (done.exit_code, done.stderr) == (130, "error: interrupted\n")


def test_the_help_names_the_questions_in_order_and_each_command_under_a_heading() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    order = [shown.index(f"{number}. {name}") for number, name in enumerate(("analyze", "what-if", "plan"), 1)]
    assert order == sorted(order)
    for number, (name, *_) in enumerate(re.findall(r"^ +\d\. ([\w-]+)(.*)$", shown, re.MULTILINE), 1):
        assert re.search(rf"^│ {name} ", shown, re.MULTILINE), (number, name)
    assert "─ Commands ─" not in shown, "every command is under a heading of its own"
