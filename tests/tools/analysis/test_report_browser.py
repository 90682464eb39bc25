"""The report works in a real browser: light, dark, wide and narrow."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from reported import full_analysis

from mbaas.tools.analysis.report import page

BROWSER = shutil.which("chromium")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs chromium on the path")]

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
)

WIDE, NARROW = 1200, 360

PROBE = """
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement, all = [...page.body.querySelectorAll("*")];
    const shown = (query) => getComputedStyle(page.querySelector(query)).display !== "none";
    const closed = root.scrollWidth - root.clientWidth;
    page.querySelectorAll("details").forEach((part) => { part.open = true; });
    const name = (part) => part.tagName + "." + part.getAttribute("class") + " " + part.textContent.slice(0, 40);
    const beyond = all.filter((part) => !part.closest(".scroll, .skip") && part.getClientRects().length
      && (part.getBoundingClientRect().right > root.clientWidth + 0.5 || part.getBoundingClientRect().left < -0.5));
    const cut = [...page.querySelectorAll("svg text")].filter((part) => {
      const inner = part.getBoundingClientRect(), outer = part.closest("svg").getBoundingClientRect();
      return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1
        || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1);
    });
    const stops = all.filter((part) => part.tabIndex === 0 && part.getClientRects().length);
    stops[0].focus();
    found[frame.width] = {
      overflow: [closed, root.scrollWidth - root.clientWidth], beyond: beyond.map(name), cut: cut.map(name),
      wide: shown("svg.wide"), tall: shown("svg.narrow"),
      first: stops[0].className, seen: stops[0].getBoundingClientRect().left >= 0,
      summaries: stops.filter((part) => part.tagName === "SUMMARY").length,
      outlined: stops.every((part) => { part.focus({focusVisible: true});
        return getComputedStyle(part).outlineStyle === "solid"; }),
      smallest: Math.min(...[...page.querySelectorAll("svg text")].map(
        (part) => part.getBoundingClientRect().height).filter((height) => height)),
    };
  }
  document.getElementById("found").textContent = JSON.stringify(found);
});
"""


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with the report in a wide and a narrow frame, and a probe that inspects both."""
    report = html.escape(page(full_analysis(), command="mbaas analyze 'feed.yaml' --step train:step"))
    frames = "".join(
        f'<iframe width="{width}" height="1600" style="border:0;flex:none" srcdoc="{report}"></iframe>'
        for width in (WIDE, NARROW)
    )
    file = tmp_path_factory.mktemp("report") / "frames.html"
    style = "<style>body { margin: 0; display: flex; gap: 40px; background: #808080; }</style>"
    file.write_text(
        f"<!DOCTYPE html><meta charset=utf-8>{style}<body>{frames}<pre id=found></pre><script>{PROBE}</script>",
        encoding="utf-8",
    )
    return file


def run(framed: Path, *options: str) -> str:
    """Run the browser and return its output. Fails if the page logs anything to the console."""
    assert BROWSER is not None
    command = [BROWSER, *QUIET, f"--user-data-dir={framed.parent / 'profile'}", *options, framed.as_uri()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    finally:
        shutil.rmtree(framed.parent / "profile", ignore_errors=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def screenshot(framed: Path, *options: str) -> NDArray[np.uint8]:
    """Pixels [row, column, RGB] of the top of the page, wide on the left and narrow on the right."""
    file = framed.with_name("screen.png")
    # On a busy machine the screenshot could otherwise precede the painting of the frames' contents.
    painted = "--run-all-compositor-stages-before-draw", "--virtual-time-budget=5000"
    run(framed, f"--window-size={WIDE + 40 + NARROW},1600", f"--screenshot={file}", *painted, *options)
    pixels: NDArray[np.uint8] = cv2.imread(str(file))[..., ::-1]
    assert pixels.shape[1] == WIDE + 40 + NARROW
    return pixels


@pytest.fixture(scope="module")
def found(framed: Path) -> dict[str, Any]:
    """Results of the probe, by width."""
    dump = run(framed, "--dump-dom", f"--window-size={WIDE + 40 + NARROW},1600")
    seen = re.search(r'<pre id="found">(.+?)</pre>', dump)
    assert seen, dump[-2000:]
    answer: dict[str, Any] = json.loads(html.unescape(seen[1]))
    return answer


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_nothing_overflows(found: dict[str, Any], width: int) -> None:
    """The page fits, closed and with all details open, and no text extends beyond its picture."""
    seen = found[str(width)]
    assert seen["overflow"] == [0, 0]
    assert seen["beyond"] == []
    assert seen["cut"] == []


def test_the_picture_fits_the_screen(found: dict[str, Any]) -> None:
    assert (found[str(WIDE)]["wide"], found[str(WIDE)]["tall"]) == (True, False)
    assert (found[str(NARROW)]["wide"], found[str(NARROW)]["tall"]) == (False, True)
    assert min(seen["smallest"] for seen in found.values()) >= 11  # CSS pixels, line height of the smallest text


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_it_can_be_used_by_keyboard(found: dict[str, Any], width: int) -> None:
    """The first stop skips the header and becomes visible; all expandable parts are stops; the focus is visible."""
    seen = found[str(width)]
    assert (seen["first"], seen["seen"]) == ("skip", True)
    assert seen["summaries"] == 12
    assert seen["outlined"]


def near(pixels: NDArray[np.uint8], colour: str) -> int:
    """Count the pixels with about this colour."""
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
    return int((np.abs(pixels.astype(int) - wanted).max(axis=-1) <= 4).sum())


def test_light_and_dark(framed: Path) -> None:
    """Both schemes have their colours for background, text and the limit, wide and narrow."""
    light, dark = screenshot(framed), screenshot(framed, "--blink-settings=preferredColorScheme=0")
    for part in (np.s_[:, :WIDE], np.s_[:, -NARROW:]):
        assert near(light[part], "#fbfaf7") > 0.6 * light[part].size / 3
        assert near(dark[part], "#14171b") > 0.6 * dark[part].size / 3
        assert near(light[part], "#14171b") == near(dark[part], "#fbfaf7") == 0
        assert near(light[part], "#1b1f24") > 1000
        assert near(dark[part], "#e9e7e2") > 1000
    assert near(light[:, :WIDE], "#b0391e") > 1000
    assert near(dark[:, :WIDE], "#ff9a80") > 1000
