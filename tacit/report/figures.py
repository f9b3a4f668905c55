"""Figures as values: drawn as SVG in the page's colors or as text, and written as CSV.

A figure holds series of points, and may add contour lines of a surface or rows of small pictures.
`to_svg` and `to_text` draw it without a plotting library, so a page stays small and needs no
network. A reader gets values from the SVG with the pointer or the arrow keys (see page.js).
"""

import csv
import html
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Self

import numpy as np

WIDTH, HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 36, 52
_ROW_NAMES = 170  # width of the column that names the rows of pictures
_SHADES = 16  # shades of gray in a picture
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # dots of a character


class Role(StrEnum):
    """What a series of a figure shows, such as a private result; it determines color and stroke."""

    PRIVATE = "private"
    BASELINE = "baseline"
    PUBLISHED = "published"
    BOUND = "bound"
    OTHER = "other"
    FOURTH = "fourth"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Named points of a figure. `low` and `high` add a band; `is_line` connects the points."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    role: Role = Role.PRIVATE
    is_line: bool = True

    @classmethod
    def of(cls, name: str, points: Iterable[Sequence[float]], role: Role = Role.PRIVATE) -> Self:
        """Return a series drawn as a line through the points (x, y)."""
        x, y = zip(*points, strict=True)
        return cls(name=name, x=x, y=y, role=role)

    def __post_init__(self) -> None:
        for field in ("x", "y", "low", "high"):
            object.__setattr__(self, field, tuple(float(v) for v in getattr(self, field)))
        if len(self.x) != len(self.y) or len(self.low) != len(self.high):
            raise ValueError(f"series {self.name!r} must have as many x as y, and low as high.")
        if self.low and len(self.low) != len(self.x):
            raise ValueError(f"series {self.name!r} must have a band at every point, or none.")


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Heights over a grid of x and y, drawn as contour lines at `levels`, lowest level first."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    z: tuple[tuple[float, ...], ...]
    """One row of heights for each y."""
    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.z) != len(self.y) or any(len(row) != len(self.x) for row in self.z):
            raise ValueError(f"surface {self.name!r} must have a row for each y, as long as x.")


@dataclass(frozen=True, kw_only=True, eq=False)
class PictureRow:
    """A named row of gray pictures, shape (pictures, height, width), with values in [0, 1]."""

    name: str
    pictures: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure: `name` is its file name and its anchor on the page, `caption` explains it.

    With a `surface`, the series are drawn as paths on it, and the reader can step along them. With
    `pictures`, the figure is a table of pictures without axes. A caption that speaks of something
    that is not drawn (`not_drawn`) raises `ValueError`.
    """

    name: str
    title: str
    caption: str
    x_label: str = ""
    y_label: str = ""
    series: tuple[Series, ...] = ()
    x_log: bool = False
    y_log: bool = False
    y_percent: bool = False
    surface: Surface | None = None
    pictures: tuple[PictureRow, ...] = ()

    def __post_init__(self) -> None:
        if missing := not_drawn(self.caption, self):
            raise ValueError(f"the caption of {self.name!r} speaks of {missing}: it is not drawn.")


def not_drawn(caption: str, figure: Figure) -> str:
    """Return what a caption speaks of and `figure` does not show; empty if there is nothing.

    >>> line = Series(name="private", x=(1,), y=(2,))
    >>> figure = Figure(name="f", title="", caption="The private model.", series=(line,))
    >>> not_drawn("Bands are one standard deviation.", figure)
    'bands'
    """
    names = [s.name for s in figure.series] + [row.name for row in figure.pictures]
    shown = {
        "without privacy": any("without privacy" in name for name in names),
        "bands": any(s.low and s.is_line for s in figure.series),
        "whiskers": any(s.low and not s.is_line for s in figure.series),
        "contour lines": figure.surface is not None,
        "points": any(not s.is_line for s in figure.series),
        "commonest class": any("commonest class" in name for name in names),
        "pictures": bool(figure.pictures),
    }
    return next((what for what, is_shown in shown.items()
                 if what in caption.lower() and not is_shown), "")  # fmt: skip


def repeats_in_words(
    counts: Iterable[int], what: str, series: Iterable[Series], *, bands: str
) -> str:
    """Return how many results each point of `series` is the mean of, and what bands show.

    >>> repeats_in_words([3, 3], "run", (), bands="reach from the smallest to the largest")
    'Each value is the mean of 3 runs.'
    """
    least, most = min(numbers := list(counts)), max(numbers)
    if most == 1:
        return f"One {what} at each place."
    number = str(most) if least == most else f"{least} to {most}"
    shown = f"; bands {bands}" if any(s.low for s in series) else ""
    return f"Each value is the mean of {number} {what}s{shown}."


def to_csv(figure: Figure) -> str:
    """Return the points of all series as CSV, with one row for each point of each series.

    >>> line = Series(name="ours", x=(1,), y=(2,))
    >>> print(to_csv(Figure(name="f", title="", caption="", x_label="a", y_label="b",
    ...                     series=(line,))).splitlines()[1])
    ours,1.0,2.0,,
    """
    rows = []
    for series in figure.series:
        low = series.low or ("",) * len(series.x)
        high = series.high or ("",) * len(series.x)
        rows += zip([series.name] * len(low), series.x, series.y, low, high, strict=True)
    return _table(["series", figure.x_label, figure.y_label, "low", "high"], rows)


def files(figure: Figure) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each file of a figure: its SVG, and its data as CSV."""
    yield f"{figure.name}.svg", to_svg_file(figure)
    yield f"{figure.name}.csv", to_csv(figure)
    if (ground := figure.surface) is not None:
        rows = (
            (x, y, z)
            for y, heights in zip(ground.y, ground.z, strict=True)
            for x, z in zip(ground.x, heights, strict=True)
        )
        content = _table([figure.x_label, figure.y_label, ground.name], rows)
        yield f"{figure.name}-surface.csv", content


def to_svg(figure: Figure) -> str:
    """Return the figure as an `<svg>` element, with its points as JSON for the script page.js."""
    if figure.pictures:
        return "\n".join(_picture_table(figure))
    xs, ys = _axes(figure)
    label = f"{figure.title}. {figure.y_label} against {figure.x_label}."
    parts = [
        _opening_tag(label, HEIGHT, _data(figure, xs, ys)),
        *_grid(figure, xs, ys),
        *([] if figure.surface is None else _contours(figure.surface, xs, ys)),
        *(_drawn(series, xs, ys) for series in figure.series),
        '<line class="cursor" y1="36" y2="348" visibility="hidden"/>',
        "</svg>",
    ]
    return "\n".join(parts)


def to_svg_file(figure: Figure) -> str:
    """Return the figure as a complete SVG file, with the page's colors, a title and a legend."""
    css = (resources.files("tacit.report") / "page.css").read_text(encoding="utf-8")
    rows = [f'<text class="label" x="{_LEFT}" y="20" font-weight="600">{html.escape(figure.title)}']
    rows.append("</text>")
    x = float(_LEFT)
    for series in figure.series:
        rows.append(
            f'<g class="series {series.role}"><circle cx="{x + 5:.0f}" cy="38" r="4"/></g>'
            f'<text x="{x + 14:.0f}" y="42">{html.escape(series.name)}</text>'
        )
        x += 30 + 6.4 * len(series.name)
    height = (_picture_height(figure) if figure.pictures else HEIGHT) + 50
    drawn = to_svg(figure)
    inner = drawn[drawn.index(">") + 1 : drawn.rindex("</svg>")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">'
        f"<style>{css}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="var(--card)"/>\n'
        f'{"".join(rows)}\n<g transform="translate(0 50)">{inner}</g></svg>\n'
    )


def to_text(figure: Figure, *, width: int = 64, height: int = 14) -> str:
    """Return the lines of a figure drawn as text, with the ranges of both axes.

    Lines are drawn with braille characters, each of which holds two by four dots.

    >>> line = Series(name="ours", x=(0, 1, 2), y=(0, 1, 0))
    >>> print(to_text(Figure(name="f", title="", caption="", series=(line,)), width=4, height=2))
    1 ┤⠀⡰⢢⠀
    0 ┤⡰⠁⠀⢣
       0  2
    """
    x_values = [x for series in figure.series for x in series.x]
    y_values = [y for series in figure.series for y in series.y]
    xs = _Axis(x_values, is_log=figure.x_log, span=(0, 2 * width - 1))
    ys = _Axis(y_values, is_log=figure.y_log, span=(4 * height - 1, 0))
    cells = np.zeros((height, width), int)
    for series in figure.series:
        across = [xs.at(x) for x in series.x]
        columns = np.arange(round(across[0]), round(across[-1]) + 1)
        at = np.interp(columns, across, [ys.at(y) for y in series.y])
        rows = np.rint(at).astype(int)  # (columns,), counted from the top
        for column, row, before in zip(columns, rows, [rows[0], *rows[:-1]], strict=True):
            # Join steep parts: dots from the last column's row (left out) to this column's row.
            dots = range(row, before) if row < before else range(before + (row > before), row + 1)
            for dot in dots:
                cells[dot // 4, column // 2] |= _BRAILLE[dot % 4, column % 2]
    labels = {0: f"{max(y_values):.4g}", height - 1: f"{min(y_values):.4g}"}
    margin = max(len(label) for label in labels.values())
    lines = [
        f"{labels.get(i, ''):>{margin}} {'┤' if i in labels else '│'}"
        + "".join(chr(0x2800 + cell) for cell in row)
        for i, row in enumerate(cells)
    ]
    left, right = f"{min(x_values):.4g}", f"{max(x_values):.4g}"
    return "\n".join([*lines, " " * (margin + 2) + left + right.rjust(width - len(left))])


class _Axis:
    """One axis of a figure: converts values to positions in the drawing, and chooses tick marks."""

    def __init__(
        self, values: Iterable[float], *, is_log: bool, span: tuple[float, float], pad: float = 0.0
    ) -> None:
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)] or [0.1, 1.0]
        low, high = min(finite), max(finite)
        if is_log:
            low, high = math.log10(low), math.log10(high)
        room = (high - low) * pad or (0.0 if high > low else max(abs(high), 1.0) * 0.1)
        self.low = low - room
        self.high = high + room
        self.is_log = is_log
        self.span = span

    def at(self, value: float) -> float:
        """Return the position of a value. On a log axis, a value <= 0 is put at the low end."""
        if self.is_log:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / (self.high - self.low)
        return self.span[0] + share * (self.span[1] - self.span[0])

    def ticks(self) -> list[float]:
        """Return the round numbers that are marked on the axis."""
        if self.is_log:
            whole = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
            steps = [10.0**k for k in whole]
            if len(steps) >= 2:
                return steps
            fine = [m * 10.0**k for k in range(whole.start - 1, whole.stop + 1) for m in (1, 2, 5)]
            return [v for v in fine if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9]
        rough = (self.high - self.low) / 5
        scale = 10.0 ** math.floor(math.log10(rough))
        step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _axes(figure: Figure) -> tuple[_Axis, _Axis]:
    """Return the x and y axes of the SVG; y has a margin, and so has x if only dots are drawn."""
    ground = figure.surface
    x_values = [x for s in figure.series for x in s.x] + list(ground.x if ground else ())
    y_values = [v for s in figure.series for v in (*s.y, *s.low, *s.high)]
    y_values += ground.y if ground else ()
    pad = 0.0 if ground else 0.06
    has_lines = ground is not None or any(s.is_line for s in figure.series)
    x_pad = 0.0 if has_lines else pad
    return (
        _Axis(x_values, is_log=figure.x_log, span=(_LEFT, WIDTH - _RIGHT), pad=x_pad),
        _Axis(y_values, is_log=figure.y_log, span=(HEIGHT - _BOTTOM, _TOP), pad=pad),
    )


def _opening_tag(label: str, height: int, data: str) -> str:
    return (
        f'<svg class="figure" viewBox="0 0 {WIDTH} {height}" role="img" tabindex="0" '
        f'aria-label="{html.escape(label)}" data-points="{data}">'
    )


def _grid(figure: Figure, xs: _Axis, ys: _Axis) -> Iterator[str]:
    bottom = HEIGHT - _BOTTOM
    for value in ys.ticks():
        y = ys.at(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        text = _number(value, percent=figure.y_percent)
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    for value in xs.ticks():
        x = xs.at(value)
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        text = f'<text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">'
        yield f"{text}{_number(value)}</text>"
    yield f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    yield (
        f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{html.escape(figure.x_label)}</text>"
    )
    yield f'<text class="label" x="4" y="16">{html.escape(figure.y_label)}</text>'


def _contours(surface: Surface, xs: _Axis, ys: _Axis) -> Iterator[str]:
    from contourpy import contour_generator

    lines = contour_generator(surface.x, surface.y, surface.z)
    for k, level in enumerate(surface.levels):
        height = 0.25 + 0.75 * (k + 1) / len(surface.levels)  # higher lines are stronger
        yield f'<g class="contour" opacity="{height:.2f}">'
        for line in lines.lines(level):
            places = [(xs.at(x), ys.at(y)) for x, y in np.asarray(line)]
            yield f'<polyline points="{_path(places)}"/>'
        yield "</g>"


def _drawn(series: Series, xs: _Axis, ys: _Axis) -> str:
    places = [(xs.at(x), ys.at(y)) for x, y in zip(series.x, series.y, strict=True)]
    out = [f'<g class="series {series.role}">']
    if series.low and not series.is_line:
        ends = zip(places, series.low, series.high, strict=True)
        out += [
            f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{ys.at(low):.1f}" '
            f'y2="{ys.at(high):.1f}"/>'
            for (x, _), low, high in ends
        ]
    elif series.low:
        up = [(xs.at(x), ys.at(v)) for x, v in zip(series.x, series.high, strict=True)]
        down = [(xs.at(x), ys.at(v)) for x, v in zip(series.x, series.low, strict=True)]
        out.append(f'<polygon class="band" points="{_path(up + down[::-1])}"/>')
    if series.is_line and len(places) > 1:
        out.append(f'<polyline points="{_path(places)}"/>')
    if len(places) <= 24 or not series.is_line:
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
    return "".join([*out, "</g>"])


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _cell(figure: Figure) -> float:
    """Return the side length in the SVG of the square in which one picture is drawn."""
    return min(96.0, (WIDTH - _ROW_NAMES) / max(len(row.pictures) for row in figure.pictures))


def _picture_height(figure: Figure) -> int:
    return math.ceil(_cell(figure) * len(figure.pictures))


def _picture_table(figure: Figure) -> Iterator[str]:
    names = ", ".join(row.name for row in figure.pictures)
    data = html.escape(json.dumps({"x": "", "is_path": False, "series": []}), quote=True)
    yield _opening_tag(f"{figure.title}. Rows: {names}.", _picture_height(figure), data)
    cell = _cell(figure)
    for k, row in enumerate(figure.pictures):
        middle = (k + 0.5) * cell + 4
        yield f'<text class="label" x="4" y="{middle:.1f}">{html.escape(row.name)}</text>'
        for j, picture in enumerate(row.pictures):
            yield _picture(picture, _ROW_NAMES + j * cell, k * cell, 0.92 * cell)
    yield '<line class="cursor" visibility="hidden"/>\n</svg>'


def _picture(picture: np.ndarray, left: float, top: float, side: float) -> str:
    """Return SVG for one gray picture: all pixels of the same shade form one path.

    The picture's upper left corner is at (`left`, `top`), and `side` is its width.
    """
    scale = side / max(picture.shape)
    shades = np.rint(_SHADES * np.clip(picture, 0.0, 1.0)).astype(int)
    paths = []
    for shade in np.unique(shades[shades > 0]):
        squares = "".join(f"M{x} {y}h1v1h-1z" for y, x in np.argwhere(shades == shade))
        paths.append(f'<path d="{squares}" opacity="{shade / _SHADES:.2f}"/>')
    height, width = picture.shape
    return (
        f'<g class="picture" transform="translate({left:.1f} {top:.1f}) scale({scale:.3f})">'
        f'<rect width="{width}" height="{height}"/>{"".join(paths)}</g>'
    )


def _data(figure: Figure, xs: _Axis, ys: _Axis) -> str:
    data = [
        {
            "name": s.name,
            "role": s.role,
            "points": [
                [round(xs.at(x), 1), round(ys.at(y), 1), _number(x),
                 _number(y, percent=figure.y_percent, digits=4)]
                for x, y in zip(s.x, s.y, strict=True)
            ],
        }
        for s in figure.series
    ]  # fmt: skip
    about = {"x": figure.x_label, "is_path": figure.surface is not None, "series": data}
    return html.escape(json.dumps(about), quote=True)


def _number(value: float, *, percent: bool = False, digits: int = 3) -> str:
    if percent:
        return f"{100 * value:.{digits}g}%"
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        mantissa, exponent = (float(part) for part in f"{value:.{digits - 1}e}".split("e"))
        power = "10" + f"{exponent:.0f}".translate(_SUPERSCRIPT)
        return power if mantissa == 1 else f"{mantissa:g}·{power}"
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()
