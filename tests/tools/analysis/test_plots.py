"""Charts show exactly the given numbers, and equal charts give equal files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from stated_rates import about

from mbaas.errors import ConfigError
from mbaas.model.quantity import Quantity
from mbaas.tools.analysis import plots

RISING = [(1, about(100, 0.1)), (2, about(170, 0.1)), (7, about(190, 0.1))]


def drawn(**more: Any) -> Any:
    """Axes of a chart with `RISING` and a line at 50."""
    level = [(at, about(50)) for at, _ in RISING]
    options: dict[str, Any] = {"title": "Speed", "x": "workers", "y": "samples/s"} | more
    return plots.lines({"shared": RISING, "alone": level}, **options).axes[0]


def test_a_line_goes_through_its_values_and_its_band_through_their_ends() -> None:
    axes = drawn()
    main, other = (line for line in axes.get_lines() if line.get_label() in ("shared", "alone"))
    assert main.get_xydata().tolist() == [[1, 100], [2, 170], [7, 190]]
    assert other.get_xydata().tolist() == [[1, 50], [2, 50], [7, 50]]
    (band,) = (part for part in axes.collections if isinstance(part, PolyCollection))
    corners = band.get_paths()[0].vertices
    for at, found in RISING:
        assert set(corners[corners[:, 0] == at, 1].tolist()) == {found.low, found.high}


def test_measured_points_and_what_they_say() -> None:
    axes = drawn(measured=[(2, Quantity(160, low=155, high=180, unit=""), "2 workers: 160")])
    (point,) = axes.containers
    (marker, _, (bar,)) = point.lines
    assert marker.get_xydata().tolist() == [[2, 160]]
    assert np.asarray(bar.get_segments()[0]).tolist() == [[2, 155], [2, 180]]
    assert marker.get_gid() == "says: 2 workers: 160"


def test_the_vertical_axis_begins_at_nothing_and_ends_above_everything() -> None:
    """190 + 10 % is 209, so ticks of 50 reach 250. A point with a high end of 260 extends them to 300."""
    assert drawn().get_yticks().tolist() == [0, 50, 100, 150, 200, 250]
    assert drawn().get_ylim() == (0, 250)
    high = [(7, Quantity(200, low=200, high=260, unit=""), "")]
    assert drawn(measured=high).get_ylim() == (0, 300)


def test_the_horizontal_axis_names_its_first_value() -> None:
    """1 to 7 in whole numbers; 0.25 to 16 in powers of 2."""
    assert drawn().get_xticks().tolist() == [1, 2, 3, 4, 5, 6, 7]
    factors = [(0.25, about(1)), (16, about(1))]
    figure = plots.lines({"predicted": factors}, title="", x="", y="", log=True, tick="{:g}".format)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    shown = [
        label.get_text() for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True) if at >= 0.25
    ]
    assert shown[:7] == ["0.25", "0.5", "1", "2", "4", "8", "16"]
    assert axes.get_xlim() == (0.25, 16)


@pytest.mark.parametrize(("enough", "above"), [(1.5, 24), (6, 10)])
def test_names_of_marks_do_not_meet(enough: float, above: float) -> None:
    texts = {text.get_text(): text for text in drawn(marks={"now": 1, "enough": enough}).texts}
    assert texts["now"].xyann == (0, 10)
    assert texts["enough"].xyann == (0, above)
    assert (texts["now"].get_ha(), texts["now"].xy) == ("left", (1, 1))  # at the left edge, so its text extends inwards


def test_a_file_has_its_title_and_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plots.save(drawn().figure, tmp_path / name)
    written = (tmp_path / "one.svg").read_text()
    assert all(f">{text}</text>" in written for text in ("Speed", "workers", "samples/s", "shared", "alone"))
    assert (tmp_path / "two.svg").read_text() == written


def test_files_that_cannot_be_drawn_into(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end with \.png or \.svg, got 'x\.pdf'"):
        plots.check_path(tmp_path / "x.pdf")
    with pytest.raises(ConfigError, match="the folder of a plot must exist"):
        plots.check_path(tmp_path / "nowhere" / "x.png")
