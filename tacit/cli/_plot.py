"""A line drawn with braille dots: each character holds two by four of them."""

from collections.abc import Sequence

import numpy as np

_BITS = np.array(
    [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]]
)  # (row, column) of a cell


def draw(
    x: Sequence[float],
    y: Sequence[float],
    *,
    width: int = 64,
    height: int = 14,
    log_x: bool = False,
) -> str:
    """The curve through (x, y) as text, with the ranges of both axes written beside it.

    >>> print(draw([0, 1, 2], [0, 1, 0], width=4, height=2))
    1 ┤⠀⡰⢢⠀
    0 ┤⡰⠁⠀⢣
       0  2
    """
    across = np.log10(x) if log_x else np.asarray(x, float)
    up = np.asarray(y, float)
    columns = np.arange(2 * width)
    at = np.interp(columns, _scaled(across, 2 * width - 1), _scaled(up, 4 * height - 1))
    rows = np.rint(4 * height - 1 - at).astype(int)  # (columns,), counted from the top
    cells = np.zeros((height, width), int)
    for column, row, before in zip(columns, rows, [rows[0], *rows[:-1]], strict=True):
        # A steep part is joined: the dots from the last column's row (left out) to this one's.
        dots = range(row, before) if row < before else range(before + (row > before), row + 1)
        for dot in dots:
            cells[dot // 4, column // 2] |= _BITS[dot % 4, column % 2]
    labels = {0: f"{up.max():.4g}", height - 1: f"{up.min():.4g}"}
    margin = max(len(label) for label in labels.values())
    lines = [
        f"{labels.get(i, ''):>{margin}} {'┤' if i in labels else '│'}"
        + "".join(chr(0x2800 + cell) for cell in row)
        for i, row in enumerate(cells)
    ]
    left, right = f"{min(x):.4g}", f"{max(x):.4g}"
    return "\n".join([*lines, " " * (margin + 2) + left + right.rjust(width - len(left))])


def _scaled(values: np.ndarray, top: int) -> np.ndarray:
    span = values.max() - values.min()
    return (values - values.min()) / (span or 1.0) * top
