"""Draws the data flow for the README, in light and dark colours in one SVG file.

`svg` returns its text, and `write` writes it to `FILE`, as ``python -m benchmarks flow`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "images" / "flow.svg"

WIDTH, HEIGHT = 760, 232

LIGHT = "--paper:#fbfaf7;--ink:#1b1f24;--soft:#565d66;--box:#ffffff;--line:#7f868f;--blue:#1f6cae"
DARK = "--paper:#14171b;--ink:#e9e7e2;--soft:#a8aeb7;--box:#1f242a;--line:#8b929c;--blue:#5ba3e0"

STYLE = """
.flow{LIGHT;max-width:100%;height:auto;
font-family:system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}
@media (prefers-color-scheme:dark){.flow{DARK}}
[data-md-color-scheme=default] .flow{LIGHT}
[data-md-color-scheme=slate] .flow{DARK}
.flow text{fill:var(--ink);font-size:15px;text-anchor:middle}
.flow .note{fill:var(--soft);font-size:12px}
.flow .feed{fill:var(--blue);font-weight:600}
.flow rect{fill:var(--box);stroke:var(--line);stroke-width:1.3}
.flow .paper{fill:var(--paper);stroke:none}
.flow .around{fill:none;stroke:var(--blue);stroke-width:1.6;stroke-dasharray:6 4}
.flow path{fill:none;stroke:var(--line);stroke-width:1.6;marker-end:url(#flow-tip)}
.flow marker path{fill:var(--line);stroke:none;marker-end:none}
""".replace("LIGHT", LIGHT).replace("DARK", DARK)
"""Colours of the system's scheme, or of the site's switch where a page of the site contains the picture."""


@dataclass(frozen=True)
class Box:
    """A box with a title and lines of notes; x and y are its left upper corner, in pixels."""

    x: int
    y: int
    width: int
    height: int
    title: str
    notes: Sequence[str] = ()

    @property
    def middle(self) -> tuple[int, int]:
        return self.x + self.width // 2, self.y + self.height // 2

    def lines(self) -> Iterator[str]:
        x, y = self.middle
        yield f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6"/>'
        top = y + 5 - 9 * len(self.notes)
        yield f'<text x="{x}" y="{top}">{self.title}</text>'
        for number, note in enumerate(self.notes, 1):
            yield f'<text class="note" x="{x}" y="{top + 19 * number}">{note}</text>'


STORAGE = Box(16, 86, 112, 74, "storage", ("files, shards,", "buckets"))
CACHE = Box(200, 86, 128, 74, "cache", ("bytes or", "decoded samples"))
PREP = Box(380, 86, 128, 74, "prep workers", ("decode, augment,", "on CPU or GPU"))
TRIALS = tuple(Box(640, 36 + 58 * number, 104, 46, f"trial {name}") for number, name in enumerate("ABC"))
AROUND = (184, 44, 340, 142)
"""Left, top, width and height of the frame around the feed."""


def svg() -> str:
    """Return the picture as SVG."""
    left, top, width, height = AROUND
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'class="flow" role="img" aria-labelledby="flow-title">',
        '<title id="flow-title">Storage is read once by a feed, whose cache and prep workers make each minibatch once; '
        "trials A, B and C read it from shared memory</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="flow-tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path d="M0 0L9 4L0 8z"/></marker></defs>',
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<rect class="around" x="{left}" y="{top}" width="{width}" height="{height}" rx="10"/>',
        f'<text class="feed" x="{left + width // 2}" y="{top + 26}">one feed on the Ray cluster</text>',
        *(line for box in (STORAGE, CACHE, PREP, *TRIALS) for line in box.lines()),
        *_arrow(STORAGE, CACHE),
        *_arrow(CACHE, PREP),
        *(line for trial in TRIALS for line in _arrow(PREP, trial)),
        f'<text class="note" x="{left + width // 2}" y="{top + height + 22}">'
        "each sample read once, each minibatch prepared once, for all trials</text>",
        f'<text class="note" x="{TRIALS[0].middle[0]}" y="{TRIALS[-1].y + 66}">shared memory</text>',
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def write() -> Path:
    """Write the picture and return its file."""
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(svg(), encoding="utf-8")
    return FILE


def _arrow(start: Box, end: Box) -> Iterator[str]:
    """Draw an arrow from the right side of a box to the left side of another one, bent if their heights differ."""
    (_, y), (_, to_y) = start.middle, end.middle
    x, to_x = start.x + start.width + 2, end.x - 3
    bend = (to_x - x) // 2
    yield f'<path d="M{x} {y}C{x + bend} {y} {to_x - bend} {to_y} {to_x} {to_y}"/>'
