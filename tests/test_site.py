"""The site of the documentation: complete, and without a request to another host."""

import re
import time
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import Browser, find_browser

import tacit
from tacit.cli import VERBS

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = find_browser()
SITE = ROOT / "site"


@pytest.fixture(scope="module")
def site() -> Path:
    if not (SITE / "index.html").is_file():
        pytest.skip("needs the site: `make docs` builds it")
    return SITE


class Loaded(HTMLParser):
    """Collects what a browser loads without a click."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag == "a":
            self.links.append(given.get("href") or "")
            self.ids.add(given.get("name") or "")
        if tag in {"script", "img", "iframe", "source"}:
            self.urls.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in {"stylesheet", "icon", "preload", "preconnect"}:
            self.urls.append(given.get("href") or "")


def read(page: Path) -> Loaded:
    loaded = Loaded()
    loaded.feed(page.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        outside = [url for url in read(page).urls if re.match(r"(https?:)?//", url)]
        assert not outside, (page.name, outside)


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    for package in tacit.__all__:
        module = getattr(tacit, package)
        if not hasattr(module, "__path__") and not hasattr(module, "__file__"):
            continue
        ids = read(site / "reference" / f"{package}.html").ids
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(import_module(f"tacit.{package}")).items()
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        ]
        missing = [
            name
            for name in names
            if not {f"tacit.{package}.{name}", f"tacit.{package}.{name}.{name}"} & ids
        ]
        assert not missing, (package, missing)


@pytest.mark.slow
def test_every_link_and_anchor_leads_somewhere(site):
    pages = {page: read(page) for page in site.rglob("*.html")}
    broken = []
    for page, loaded in pages.items():
        for link in [*loaded.links, *loaded.urls]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            known = not anchor or target not in pages or anchor in pages[target].ids
            if not target.is_file() or not known:
                broken.append((page.name, link))
    assert broken == []


@pytest.mark.slow
def test_every_tutorial_shows_what_its_cells_printed(site):
    for script in (ROOT / "docs" / "tutorials").glob("*.py"):
        page = (site / "tutorials" / f"{script.stem}.html").read_text(encoding="utf-8")
        assert "output" in page, script.name
        assert (site / "tutorials" / f"{script.stem}.ipynb").is_file()


@pytest.mark.slow
def test_every_verb_of_the_command_line_is_used_on_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert [verb for verb in VERBS if not re.search(rf"`?tacit {verb}\b", pages)] == []


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="needs chromium or chrome, or TACIT_BROWSER")
def test_search_finds_a_page_without_a_server(site, tmp_path):
    found = "[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)"
    with Browser(str(PROGRAM), tmp_path) as browser:
        browser.open(site / "index.html", scheme="light", width=1280)
        browser.run(
            "document.querySelector('[data-md-toggle=search]').click();"
            "const box = document.querySelector('.md-search__input');"
            "box.focus(); box.value = 'banded noise';"
            "box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); 0"
        )
        end = time.monotonic() + 30
        while not (links := browser.run(found)) and time.monotonic() < end:
            time.sleep(0.1)
        assert any("correlated-noise" in str(link) or "banded" in str(link) for link in links)
        loaded = browser.run("performance.getEntriesByType('resource').map(e => e.name)")
        assert all(str(url).startswith(("file:", "blob:", "data:")) for url in loaded)
        assert browser.complaints == []
