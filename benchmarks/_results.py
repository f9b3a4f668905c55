"""What every benchmark shares: timing, the environment line, and one Markdown table per result."""

import datetime
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tacit

RESULTS = Path(os.environ.get("TACIT_RESULTS", Path(__file__).parent / "results"))


def cpu_seconds(call: Callable[[], object], *, repeats: int = 5, enough: float = 2.0) -> float:
    """Median CPU seconds of `call` over up to `repeats` runs, fewer once `enough` are spent."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < enough:
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def environment(packages: Iterable[str]) -> str:
    """One line: date, Python and package versions."""
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    today = datetime.date.today().isoformat()
    return f"{today}; Python {platform.python_version()}, {platform.machine()}; {versions}."


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def write(
    name: str, title: str, packages: Iterable[str], *blocks: str, is_final: bool = True
) -> Path:
    """Write the blocks, under the environment line, to `results/<name>.md`; print final ones.

    Results that are not final are written at once, in case the benchmark is stopped. The variable
    `TACIT_RESULTS` names another folder.
    """
    text = "\n\n".join([f"# {title}", environment(packages), *blocks]) + "\n"
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text(text, encoding="utf-8")
    if is_final:
        print(text, flush=True)
    return path


def _version(name: str) -> str:
    if name == "tacit":
        return tacit.__version__  # of this checkout, whatever is installed
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
