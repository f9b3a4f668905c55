"""The terminal plot: every column drawn, no gaps, right ends."""

import numpy as np
import pytest

from tacit.cli._plot import _BITS, draw


def dots(text: str, width: int, height: int) -> np.ndarray:
    """(4 height, 2 width) marks of the dots set."""
    marks = np.zeros((4 * height, 2 * width), bool)
    for i, line in enumerate(text.splitlines()[:height]):
        for j, character in enumerate(line[-width:]):
            cell = ord(character) - 0x2800
            marks[4 * i : 4 * i + 4, 2 * j : 2 * j + 2] = (_BITS & cell) > 0
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
