"""Pages of the tutorials: executed notebooks, each cell followed by what it printed.

docs/tutorials/NAME.py is the source. `make docs` executes it into build/notebooks/NAME.ipynb;
mkdocs calls `on_files` below, which shows that notebook and offers it for download.
"""

import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "build" / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page and a notebook for each tutorial."""
    for script in sorted((ROOT / "docs" / "tutorials").glob("*.py")):
        path = NOTEBOOKS / f"{script.stem}.ipynb"
        page = f"tutorials/{script.stem}"
        files.append(File.generated(config, f"{page}.md", content=page_of(script, path)))
        files.append(File.generated(config, f"{page}.ipynb", abs_src_path=str(path)))
    return files


def page_of(script: Path, path: Path) -> str:
    """Return an executed notebook as Markdown, or raise if the script changed since."""
    notebook = nbformat.read(path, as_version=4) if path.is_file() else None
    written = [cell.source for cell in jupytext.read(script).cells]
    if notebook is None or [cell.source for cell in notebook.cells] != written:
        raise PluginError(f"{script.name} was not executed as it stands; `make docs` does that.")
    title, *parts = (shown for cell in notebook.cells for shown in shown_cell(cell, script))
    files = f"[Notebook]({script.stem}.ipynb){{ download }} · [script]({script.name}){{ download }}"
    return "\n\n".join([re.sub(r"\n", f"\n\n{files}\n", title, count=1), *parts, ""])


def shown_cell(cell: Any, script: Path) -> list[str]:
    """Return the Markdown of one cell and of what it printed."""
    if cell.cell_type == "markdown":
        return [cell.source]
    code = cell.source.replace("  # fmt: skip", "")  # for the formatter, not for readers
    return [fenced(code, ".python"), *(shown_output(one, script) for one in cell.outputs)]


def shown_output(output: Any, script: Path) -> str:
    """Return what a cell printed or ended with; a warning on the page would be a fault."""
    text = output.get("text") or output.get("data", {}).get("text/plain")
    if output.get("name") == "stderr" or text is None:
        raise PluginError(f"{script.name}: a cell has output other than printed text: {output}")
    return fenced(text.rstrip(), ".text .output")


def fenced(text: str, classes: str) -> str:
    return f"```{{ {classes} }}\n{text}\n```"
