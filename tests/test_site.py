"""The site of the documentation: complete, and without a request to another host."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

import tacit

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("mkdocs", "material", "mkdocstrings")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if any(importlib.util.find_spec(tool) is None for tool in TOOLS):
        pytest.skip("needs the packages of docs/requirements.txt, which `make docs` installs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


class Loaded(HTMLParser):
    """Collects what a browser loads without a click."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
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
