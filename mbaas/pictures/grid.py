"""Draws images as a grid in one picture, with a caption below each image, and boxes and keypoints on it."""

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
"""Limits of an image's longer side in the grid, in pixels. Factors of enlargement are whole, to keep pixels square."""

GAP = 8
LINE = 15
"""Pixels between images, and between lines of text."""

TEXT = 11.0
CHARACTER = 7.0
"""Font size, and average width of a character, rounded up."""

LEAST_WIDTH = 640
"""Minimum width in pixels of a picture with a title, so that the title fits."""

BOX = "#ffd23f"
POINT, POINT_RADIUS = "#00e5ff", 2.5
"""Colour of keypoints, and their radius in pixels of the picture."""

INK = "#333333"


@dataclass(frozen=True)
class Cell:
    """One image of the grid.

    Attributes:
        edges: float[k, 4], left, top, right and bottom of the boxes, in pixels of the image.
        points: float[n, 2], x and y of the keypoints; 0 is the centre of the first pixel.
    """

    image: Image
    lines: tuple[str, ...]
    edges: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 4)))
    points: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))


@dataclass(frozen=True)
class Layout:
    """Positions of n images of one size, in pixels from the upper left corner.

    Attributes:
        shown: (height, width) of an image in the grid.
        top: top of the first row, below the title.
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
        """Lay out ``count`` images of (height, width) ``image``, in a grid with an aspect ratio of about 3:2."""
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
    """Return the (height, width) in the grid of an image of (height, width)."""
    longer = max(image)
    factor = -(-LEAST_SIDE // longer) if longer < LEAST_SIDE else min(1.0, most_side / longer)
    height, width = (max(1, round(side * factor)) for side in image)
    return height, width


def check_path(path: Path) -> None:
    """Raise ConfigError early if the name does not end in .png, or the folder does not exist."""
    if path.suffix.lower() != SUFFIX:
        raise ConfigError(f"a picture's file must end with {SUFFIX}, got {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of a picture must exist, got {path.parent}")


def draw(cells: Sequence[Cell], to: Path | IO[bytes], *, title: Sequence[str], most_side: int = MOST_SIDE) -> Layout:
    """Write a PNG of images of the same size to a path (see `check_path`) or an open file; return their layout.

    Args:
        title: lines above the grid.
        most_side: maximum pixels of an image's longer side; larger images are shrunk.

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
            # If the font lacks a script, boxes replace the letters, which makes the problem obvious without a warning.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(to, dpi=figure.dpi, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error.strerror}") from None
    return layout


def _figure(size: tuple[int, int]) -> Figure:
    from matplotlib.figure import Figure  # lazy: the import takes a second, and most commands draw nothing

    dpi = 72  # makes a point, the unit of font sizes, equal to a pixel
    # Half a pixel more, because matplotlib truncates when it converts inches to pixels.
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
    """Write a line of at most ``width`` pixels at ``at`` (top, left)."""
    from matplotlib.transforms import IdentityTransform

    text, most = " ".join(text.split()), max(2, int(width / CHARACTER))
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    options: dict[str, Any] = {"transform": IdentityTransform(), "parse_math": False}  # a name may contain "$"
    figure.text(at[1], layout.size[0] - at[0], cut, va="top", size=TEXT, color=INK, **options)
