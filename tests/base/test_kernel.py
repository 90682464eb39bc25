"""In a real Jupyter kernel, progress bars update in place, and only slow work has one."""

from __future__ import annotations

import json
from typing import Any

import nbclient
import nbformat
import pytest

pytestmark = pytest.mark.slow

BEGIN = """
import json, time
from mbaas.base import notebook, progress

sent = []
def note(message):
    sent.append(message["msg_type"])
    return message
get_ipython().display_pub.register_hook(note)

def slowly(letters):
    for letter in progress.track(letters, "letters", len(letters)):
        time.sleep(0.15)
"""

OFTEN = """
began, sent[:] = time.monotonic(), []
for _ in progress.track(range(10**9), "<numbers>", 10**9):
    if time.monotonic() - began > 2.5:
        break
print(json.dumps([time.monotonic() - began, len(sent)]))
"""

CELLS = {"begin": BEGIN, "long": "slowly('abcdefghijkl')", "short": "slowly('ab')", "often": OFTEN}


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[Any]]:
    """Outputs below each cell after a full run, as a browser shows them."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS.values()])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


def test_a_bar_stays_one_output(outputs: dict[str, list[Any]]) -> None:
    (bar,) = outputs["long"]
    assert bar.output_type == "display_data"
    assert bar.data["text/plain"].startswith("12 of 12 letters, ")
    assert '<progress value="12" max="12"' in bar.data["text/html"]
    assert "12 of 12 letters" in bar.data["text/html"]


def test_what_is_short_shows_nothing(outputs: dict[str, list[Any]]) -> None:
    assert (outputs["begin"], outputs["short"]) == ([], [])


def test_a_bar_does_not_move_at_every_step(outputs: dict[str, list[Any]]) -> None:
    *_, told = [each for each in outputs["often"] if each.output_type == "stream"]
    elapsed, messages = json.loads(told.text)
    assert 1 <= messages <= (elapsed - 1) / 0.2 + 2
    assert all("<numbers>" not in each.data["text/html"] for each in outputs["often"] if "data" in each)
