"""Figures as SVG, as text in the terminal, and as CSV."""

from xml.etree import ElementTree

import numpy as np
import pytest

from tacit.report.figures import (
    _BRAILLE,
    Figure,
    PictureRow,
    Series,
    to_csv,
    to_svg,
    to_svg_file,
    to_text,
)


def figure(**changes):
    line = Series(
        name="a", x=(1, 10, 100), y=(0.1, 0.5, 0.9), low=(0, 0.4, 0.8), high=(0.2, 0.6, 1)
    )
    base = {"name": "f", "title": "T", "caption": "c", "x_label": "x", "y_label": "y"}
    return Figure(**(base | {"series": (line,)} | changes))


def test_figures_of_awkward_data_are_finite():
    for changes in (
        {"x_log": True},
        {"y_log": True},
        {"series": (Series(name="one", x=(3,), y=(5,)),)},
        {"series": (Series(name="flat", x=(1, 2), y=(0, 0)),)},
        {"series": ()},
        {"series": (Series(name="tiny", x=(1e-9, 1e-3), y=(1e6, 1e7)),), "x_log": True},
    ):
        drawn = to_svg(figure(**changes))
        assert "nan" not in drawn
        assert "inf" not in drawn


def test_a_figure_is_a_picture_of_its_own():
    drawn = ElementTree.fromstring(to_svg_file(figure(title="A & B")))
    text = " ".join(drawn.itertext())
    assert "A & B" in text
    assert "a" in [part.strip() for part in drawn.itertext()], "the legend"
    assert drawn.tag.endswith("svg")


def test_csv_has_a_row_for_every_point():
    rows = to_csv(figure()).splitlines()
    assert rows[0] == "series,x,y,low,high"
    assert rows[1:] == ["a,1.0,0.1,0.0,0.2", "a,10.0,0.5,0.4,0.6", "a,100.0,0.9,0.8,1.0"]


def test_a_series_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="as many"):
        Series(name="a", x=(1, 2), y=(1,))


def draw(x, y, **size) -> str:
    return to_text(figure(series=(Series(name="a", x=tuple(x), y=tuple(y)),)), **size)


def dots(text: str, width: int, height: int) -> np.ndarray:
    """(4 height, 2 width) marks of the dots set."""
    marks = np.zeros((4 * height, 2 * width), bool)
    for i, line in enumerate(text.splitlines()[:height]):
        for j, character in enumerate(line[-width:]):
            cell = ord(character) - 0x2800
            marks[4 * i : 4 * i + 4, 2 * j : 2 * j + 2] = (_BRAILLE & cell) > 0
    return marks


@pytest.mark.parametrize("y", [[0, 1], [1, 0], [0, 5, 1, 4], [0, 100, 100, 0]], ids=str)
def test_the_line_is_connected_and_spans_the_plot(y):
    marks = dots(draw(range(len(y)), y, width=30, height=8), 30, 8)
    assert marks.any(axis=0).all()
    for left, right in zip(marks.T[:-1], marks.T[1:], strict=True):
        nearest = np.abs(np.flatnonzero(left)[:, None] - np.flatnonzero(right)).min()
        assert nearest <= 1
    assert marks[0].any()
    assert marks[-1].any()


def test_an_increasing_curve_rises():
    marks = dots(draw(range(50), np.sqrt(range(50)), width=30, height=8), 30, 8)
    top = marks.argmax(axis=0)
    assert (np.diff(top) <= 0).all()
    assert (top[0], top[-1]) == (31, 0)


def test_a_constant_curve_is_drawn():
    assert draw([1, 2, 3], [2, 2, 2], width=5, height=2).count("\n") == 2


def test_the_axes_name_their_ends():
    text = draw([1, 10_000], [0.25, 3.5], width=30, height=6)
    assert text.splitlines()[0].startswith(" 3.5 ┤")
    assert text.splitlines()[5].startswith("0.25 ┤")
    assert text.splitlines()[-1].split() == ["1", "1e+04"]


def test_text_draws_every_series():
    both = (Series(name="a", x=(0, 4), y=(0, 0)), Series(name="b", x=(1, 3), y=(9, 9)))
    marks = dots(to_text(figure(series=both), width=10, height=3), 10, 3)
    assert marks[-1].all()
    assert marks[0].nonzero()[0].tolist() == list(range(5, 15))


def test_pictures_are_drawn_in_the_ink_of_the_page():
    rows = tuple(PictureRow(name=n, pictures=np.eye(3)[None] / 2) for n in ("a < b", "c"))
    drawn = ElementTree.fromstring(to_svg_file(figure(series=(), pictures=rows)))
    assert "a < b" in list(drawn.itertext())
    (path, *others) = drawn.iter("{http://www.w3.org/2000/svg}path")
    assert path.get("d") == "M0 0h1v1h-1zM1 1h1v1h-1zM2 2h1v1h-1z"
    assert path.get("opacity") == "0.50"
    assert len(others) == 1
