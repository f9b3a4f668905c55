"""Draw the pictures of pages in docs/: python docs/pictures.py RUNS/ site/.

RUNS/ holds the folders demo, sweep, pate, regress, audit and comparison, as the verbs write them
(audit is a run after `tacit audit`, comparison comes from `tacit report`); site/ is what `make
docs` built. Each picture in docs/screenshots shows one page three times: light, dark, and on a
phone. report.png, the picture in the README, is the top of the page in demo. The script fails if a
page writes to the console or loads anything that is not a file.
"""

import sys
import tempfile
from base64 import b64decode, b64encode
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "report"))
from browser import Browser, find_browser  # noqa: E402  # found by the line above

RUNS = {
    "demo": "",
    "sweep": "",
    "pate": "",
    "regress": "",
    "audit": "audit",
    "comparison": "",
}  # shown from here on
PAGES = ("index", "tutorials/lora", "reference/training")
VIEWS = (("light", 1280), ("dark", 1280), ("light", 390))  # preferred colors, width of the window
HEIGHT, SHOWN, GAP = 1240, 640, 8  # of a window; of a view in the picture; between two views
TOTAL = sum(width * SHOWN // HEIGHT + GAP for _, width in VIEWS)
MOST_BYTES = 100_000


def main(runs: Path, site: Path) -> None:
    """Save all pictures."""
    program = find_browser()
    if program is None:
        sys.exit("needs chromium or chrome on the path, or its path in TACIT_BROWSER")
    pages = {name: (runs / name / "report.html", place) for name, place in RUNS.items()}
    pages |= {f"site-{name.replace('/', '-')}": (site / f"{name}.html", "") for name in PAGES}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        Browser(program, Path(profile)) as browser,
    ):
        for name, (page, place) in pages.items():
            views = [view(browser, page.resolve(), place, *how) for how in VIEWS]
            beside = Path(profile) / "beside.html"
            beside.write_text(side_by_side(views), encoding="utf-8")
            browser.open(beside, scheme="light", width=TOTAL, height=SHOWN)
            (HERE / "screenshots" / f"{name}.jpg").write_bytes(small(browser))
        browser.open(
            (runs / "demo/report.html").resolve(), scheme="light", width=960, height=HEIGHT
        )
        (HERE / "report.png").write_bytes(shot(browser, format="png"))


def view(browser: Browser, page: Path, place: str, scheme: str, width: int) -> bytes:
    """Return a picture of a page from `place` on; exit if it complains or loads from outside."""
    browser.open(page, scheme=scheme, width=width, height=HEIGHT)
    if place:
        browser.run(f"document.getElementById('{place}').scrollIntoView({{behavior: 'instant'}})")
    loaded = browser.run("performance.getEntriesByType('resource').map(e => e.name)")
    outside = [url for url in loaded if not url.startswith(("file:", "data:", "blob:"))]
    if outside or browser.complaints:
        sys.exit(f"{page}: {outside or browser.complaints}")
    return shot(browser, format="png")


def side_by_side(views: list[bytes]) -> str:
    """Return a page that shows pictures in one row."""
    images = (f'<img src="data:image/png;base64,{b64encode(one).decode()}">' for one in views)
    style = f"body{{margin:0;display:flex;gap:{GAP}px;background:#888}}img{{height:{SHOWN}px}}"
    return f"<style>{style}</style>{''.join(images)}"


def small(browser: Browser) -> bytes:
    """Return the best JPEG picture of the window that is small enough."""
    found = (shot(browser, format="jpeg", quality=quality) for quality in range(80, 10, -10))
    return next(picture for picture in found if len(picture) <= MOST_BYTES)


def shot(browser: Browser, **options: object) -> bytes:
    return b64decode(browser.call("Page.captureScreenshot", **options)["data"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
