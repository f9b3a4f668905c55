"""The page in a real browser: figures are drawn, the console is empty, the keyboard is enough."""

import os

import pytest
from browser import Browser, find_browser

from tacit.report import write_page

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(
    PROGRAM is None or os.name != "posix",
    reason="needs chromium or chrome on the path, or its path in TACIT_BROWSER",
)
DESKTOP, PHONE = 1280, 390
FIGURES = "[...document.querySelectorAll('svg.figure')]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(run):
    return write_page(run.path)


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_drawn_and_the_console_stays_empty(browser, page, scheme, width):
    browser.open(page, scheme=scheme, width=width)
    lengths = browser.run(
        f"{FIGURES}.map(f => [...f.querySelectorAll('polyline')].map(p => p.getTotalLength()))"
    )
    assert [len(lines) for lines in lengths] == [2, 1]
    assert all(length > 100 for lines in lengths for length in lines)
    for box in browser.run(f"{FIGURES}.map(f => f.getBoundingClientRect().toJSON())"):
        assert box["width"] > 0.7 * min(width, 900)
        assert box["height"] > 0.5 * box["width"]
    assert browser.run("document.documentElement.scrollWidth") == width, "nothing sticks out"
    assert browser.complaints == []


def test_dark_and_light_are_two_themes_with_readable_text(browser, page):
    colors = {}
    script = "['backgroundColor', 'color'].map(c => getComputedStyle(document.body)[c])"
    for scheme in ("light", "dark"):
        browser.open(page, scheme=scheme, width=DESKTOP)
        background, ink = (brightness(color) for color in browser.run(script))
        colors[scheme] = background
        lighter, darker = max(background, ink), min(background, ink)
        assert (lighter + 0.05) / (darker + 0.05) > 7, "contrast as WCAG 2 asks for at level AAA"
        line = browser.run("getComputedStyle(document.querySelector('.series polyline')).stroke")
        assert line.startswith("rgb")
    assert colors["light"] > 0.8 > 0.1 > colors["dark"]


def brightness(color: str) -> float:
    """Relative luminance of rgb(r, g, b), as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in color.strip("rgb()").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_figure_link_and_table_is_reached_by_the_keyboard(browser, page):
    browser.open(page, scheme="light", width=DESKTOP)
    wanted = browser.run(
        "[...document.querySelectorAll('svg.figure, a, summary, .table')]"
        ".map((e, i) => (e.dataset.n = i, i))"
    )
    reached = []
    for _ in range(len(wanted) + 2):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.dataset.n"))
    assert [int(n) for n in reached if n is not None][: len(wanted)] == wanted, "in reading order"
    ring = "getComputedStyle(document.querySelector('svg.figure')).outlineStyle"
    browser.open(page, scheme="light", width=DESKTOP)
    browser.press("Tab")
    assert browser.run(ring) == "solid", "and the focus is seen"


def test_arrow_keys_read_values_off_a_figure(browser, page):
    browser.open(page, scheme="light", width=DESKTOP)
    tip = "document.querySelector('figure .tip')"
    browser.run(f"{FIGURES}[0].focus()")
    assert browser.run(f"{tip}.innerText").split("\n") == [
        "epoch: 1",
        "private: 54%",
        "without privacy: 72.7%",
    ]
    browser.press("ArrowRight")
    assert "epoch: 2" in browser.run(f"{tip}.innerText")
    browser.press("End")
    assert "private: 90%" in browser.run(f"{tip}.innerText")
    assert browser.run(f"getComputedStyle({tip}).visibility") == "visible"


def test_the_pointer_shows_values_inside_the_window(browser, page):
    for width in (DESKTOP, PHONE):
        browser.open(page, scheme="light", width=width)
        browser.run(f"{FIGURES}[0].scrollIntoView({{behavior: 'instant', block: 'center'}})")
        box = browser.run(f"{FIGURES}[0].getBoundingClientRect().toJSON()")
        for share in (0.15, 0.95):
            browser.point(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
            seen = browser.run("document.querySelector('.tip').getBoundingClientRect().toJSON()")
            assert seen["width"] > 0
            assert seen["left"] >= 0
            assert seen["right"] <= width


def test_the_certificate_opens_by_key_and_the_page_prints(browser, page):
    browser.open(page, scheme="light", width=DESKTOP)
    browser.run("document.querySelector('summary').focus()")
    browser.press("Enter")
    assert browser.run("document.querySelector('details').open") is True
    printed = browser.call("Page.printToPDF", printBackground=True)
    assert len(printed["data"]) > 10_000


def test_a_surface_is_drawn_with_its_paths(browser, tmp_path):
    from tacit.report.figures import Figure, Role, Series, Surface
    from tacit.report.page import Page, render

    axis = tuple(k / 10 for k in range(-20, 21))
    heights = tuple(tuple(-(x**2) - y**2 for x in axis) for y in axis)
    figure = Figure(
        name="surface",
        title="A hill",
        caption="",
        x_label="a",
        y_label="b",
        series=(
            Series(name="private", x=(-1, 0.1), y=(-1, 0.2)),
            Series(name="ordinary", x=(-1, -0.5, 0), y=(-1, -0.2, 0), role=Role.BASELINE),
        ),
        surface=Surface(name="height", x=axis, y=axis, z=heights, levels=(-4, -2, -1)),
    )
    path = tmp_path / "hill.html"
    path.write_text(render(Page(title="t", lead="l", numbers=(), figures=(figure,))), "utf-8")
    browser.open(path, scheme="dark", width=DESKTOP)
    assert browser.run("document.querySelectorAll('.contour polyline').length") >= 3
    browser.run(f"{FIGURES}[0].focus()")
    browser.press("End")
    assert browser.run("document.querySelector('.tip').innerText").split("\n") == [
        "step 2",
        "private: (0.1, 0.2)",
        "ordinary: (0, 0)",
    ]
    assert browser.complaints == []
