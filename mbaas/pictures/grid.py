"""Draws images as one picture: a grid, with what is known of each image below it, and boxes and key points on it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Image = NDArray[np.uint8]
"""[height, width, 3], RGB."""

SUFFIX = ".png"

LEAST_SIDE, MOST_SIDE = 96, 320
"""Pixels of an image's longer side in the grid. Smaller images are enlarged a whole number of times, so that each pixel
is a square; larger ones are shrunk."""

GAP = 8
LINE = 15
"""Pixels between images, and from one line of text to the next."""

TEXT = 11.0
CHARACTER = 7.0
"""Size of text, and how wide a character of it is, on average and rounded up."""

LEAST_WIDTH = 640
"""Pixels of a picture that has a title, so that there is room for it."""

BOX = "#ffd23f"
POINT, POINT_RADIUS = "#00e5ff", 2.5
"""Colour of key points, and their radius in pixels of the picture."""

INK = "#333333"


@dataclass(frozen=True)
class Cell:
    """One image of the grid.

    Attributes:
        image: its pixels.
        lines: what is written below it.
        edges: float[k, 4], left, top, right and bottom of the boxes on it, in its pixels.
        points: float[n, 2], x and y of the key points on it; 0 is the middle of its first pixel.
    """

    image: Image
    lines: tuple[str, ...]
    edges: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 4)))
    points: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))


@dataclass(frozen=True)
class Layout:
    """Where n images of one size stand, all in pixels from the upper left corner.

    Attributes:
        columns: images in a row.
        shown: (height, width) of an image in the grid.
        top: where the first row begins, below the title.
        text: height of the text below an image.
        size: (height, width) of the picture.
    """

    columns: int
    shown: tuple[int, int]
    top: int
    text: int
    size: tuple[int, int]

    @classmethod
    def of(
        cls, count: int, image: tuple[int, int], *, title_lines: int, lines: int, most_side: int = MOST_SIDE
    ) -> Layout:
        """Lay out ``count`` images of (height, width) ``image``, in a grid about half as wide again as high."""
        height, width = shown_size(image, most_side)
        text = lines * LINE + GAP
        columns = min(count, max(1, round(math.sqrt(1.5 * count * (height + text) / (width + GAP)))))
        rows = -(-count // columns)
        top = title_lines * LINE + 2 * GAP
        across = max(LEAST_WIDTH if title_lines else 0, columns * (width + GAP) + GAP)
        return cls(columns, (height, width), top, text, (top + rows * (height + text) + GAP, across))

    def corner(self, number: int) -> tuple[int, int]:
        """Return (top, left) of an image."""
        row, column = divmod(number, self.columns)
        height, width = self.shown
        return self.top + row * (height + self.text), GAP + column * (width + GAP)


def shown_size(image: tuple[int, int], most_side: int = MOST_SIDE) -> tuple[int, int]:
    """Return (height, width) in the grid of an image of (height, width)."""
    longer = max(image)
    factor = -(-LEAST_SIDE // longer) if longer < LEAST_SIDE else min(1.0, most_side / longer)
    height, width = (max(1, round(side * factor)) for side in image)
    return height, width


def check_path(path: Path) -> None:
    """Refuse early what could not be written later.

    Raises:
        ConfigError: the name does not end in .png, or the folder is not there.
    """
    if path.suffix.lower() != SUFFIX:
        raise ConfigError(f"a picture's file must end with {SUFFIX}, got {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of a picture must exist, got {path.parent}")


def draw(cells: Sequence[Cell], to: Path | IO[bytes], *, title: Sequence[str], most_side: int = MOST_SIDE) -> Layout:
    """Write a PNG of images that all have one size; return where each is.

    Args:
        cells: at least one.
        to: a file, by its path (see `check_path`) or open for writing.
        title: lines above the grid.
        most_side: pixels of the longer side of an image; larger ones are shrunk to that.

    Raises:
        ConfigError: the file cannot be written.
    """
    height, width = cells[0].image.shape[:2]
    most_lines = max(len(cell.lines) for cell in cells)
    layout = Layout.of(len(cells), (height, width), title_lines=len(title), lines=most_lines, most_side=most_side)
    figure = _figure(layout.size)
    for number, line in enumerate(title):
        _write(figure, layout, (GAP + number * LINE, GAP), line, layout.size[1] - 2 * GAP)
    for number, cell in enumerate(cells):
        _draw_cell(figure, layout, number, cell)
    try:
        with warnings.catch_warnings():
            # A name in a script that the font lacks shows boxes for letters, which says it plainly enough.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(to, dpi=figure.dpi, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error.strerror}") from None
    return layout


def _figure(size: tuple[int, int]) -> Figure:
    """Make an empty white figure in which a unit of a picture's coordinates is a pixel."""
    from matplotlib.figure import Figure  # here: it takes a second, and most commands draw nothing

    dpi = 72  # a point, in which matplotlib measures text, is then a pixel
    # Half a pixel more: what matplotlib cuts off when it turns inches into pixels must not be one of them.
    return Figure(figsize=((size[1] + 0.5) / dpi, (size[0] + 0.5) / dpi), dpi=dpi, facecolor="white")


def _draw_cell(figure: Figure, layout: Layout, number: int, cell: Cell) -> None:
    from matplotlib.patches import Circle, Rectangle
    from matplotlib.transforms import IdentityTransform

    (top, left), (height, width) = layout.corner(number), layout.shown
    whole = layout.size[0]
    figure.figimage(_scaled(cell.image, (height, width)), left, whole - top - height)
    scale = np.array([width / cell.image.shape[1], height / cell.image.shape[0]])
    for x0, y0, x1, y1 in (cell.edges * np.tile(scale, 2)).tolist():
        corner = left + x0, whole - top - y1
        box = Rectangle(corner, x1 - x0, y1 - y0, fill=False, edgecolor=BOX, linewidth=1.5)
        box.set_transform(IdentityTransform())
        figure.add_artist(box)
    for x, y in ((cell.points + 0.5) * scale).tolist():
        point = Circle((left + x, whole - top - y), POINT_RADIUS, facecolor=POINT, edgecolor=INK, linewidth=0.5)
        point.set_transform(IdentityTransform())
        figure.add_artist(point)
    for line, text in enumerate(cell.lines):
        _write(figure, layout, (top + height + 2 + line * LINE, left), text, width)


def _scaled(image: Image, size: tuple[int, int]) -> Image:
    if image.shape[:2] == size:
        return image
    is_shrunk = size[0] < image.shape[0]
    return np.asarray(
        cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA if is_shrunk else cv2.INTER_NEAREST), np.uint8
    )


def _write(figure: Figure, layout: Layout, at: tuple[int, int], text: str, width: int) -> None:
    """Write a line that is at most ``width`` pixels wide; ``at`` is its (top, left)."""
    from matplotlib.transforms import IdentityTransform

    text, most = " ".join(text.split()), max(2, int(width / CHARACTER))
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    options: dict[str, Any] = {"transform": IdentityTransform(), "parse_math": False}  # a name may have a dollar in it
    figure.text(at[1], layout.size[0] - at[0], cut, va="top", size=TEXT, color=INK, **options)
