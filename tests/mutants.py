"""Change one operator, sign, comparison, number or min/max at a time, and see whether tests fail.

`python tests/mutants.py --mutants 100 --seconds 280` tries mutants for at most 280 seconds, adds
one row for each to `benchmarks/results/mutants.csv`, and goes on from there when called again;
`--summary` prints what the file says. The seed fixes which mutants are tried. They are applied to
a copy of `tacit/` and `tests/` in a temporary folder, never to the working tree.

A mutant is killed if a test fails, or if the tests take more than 3 times as long as without it (an
endless loop). It is `unfinished`, hence not killed, if the tests were stopped after 20 seconds, but
within 3 times that.
"""

import argparse
import ast
import copy
import csv
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/mutants.csv"
SEED = 20261119
LIMIT = 20.0  # seconds for the tests of one mutant
ENDLESS = 3.0  # times the duration without a mutant, from which on tests count as endless

# The tests that cover each file: of its own name, then neighbors and contracts, fastest first.
TESTS = {
    "tacit/events.py": "test_events accounting/test_corners accounting/test_every_event",
    "tacit/accounting/compose.py": "accounting/test_compose accounting/test_nested",
    "tacit/ledger/filter.py": "ledger/test_filter ledger/test_copies ledger/test_ledger",
    "tacit/mechanisms/grid.py": "mechanisms/test_grid mechanisms/test_gaussian",
    "tacit/mechanisms/noise_laws.py": "mechanisms/test_noise_laws mechanisms/test_grid",
    "tacit/training/noise/grid_noise.py": "training/test_grid_noise training/test_noise",
    "tacit/sampling.py": "test_sampling training/test_lots",
    "tacit/training/clipping/clip.py": "training/test_clip contracts/test_clipped_sum",
    "tacit/training/private.py": "training/test_private",
    "tacit/training/noise/noisy_mean.py": "training/test_noise training/test_banded_noise",
}
FIELDS = ("version", "file", "line", "change", "result", "by", "seconds", "judgment")

SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And, ast.USub: ast.UAdd,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
EXTREMES = ("min", "max", "minimum", "maximum", "amin", "amax", "clamp_min", "clamp_max", "floor",
            "ceil")  # fmt: skip
OPPOSITE = {name: EXTREMES[i ^ 1] for i, name in enumerate(EXTREMES)}


class Mutant(NamedTuple):
    """A file with one change: where, what, and the whole text of the changed file."""

    file: str
    line: int
    change: str
    text: str


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return every mutant of one file, in the order of the syntax tree."""
    found = []
    lines = text.encode().splitlines(keepends=True)
    for node in _code(ast.parse(text)):
        for changed in _changes(node):
            first, last = node.lineno - 1, node.end_lineno - 1
            before = b"".join(lines[:first]) + lines[first][: node.col_offset]
            after = lines[last][node.end_col_offset :] + b"".join(lines[last + 1 :])
            mutated = before + f"({ast.unparse(changed)})".encode() + after
            change = f"{ast.unparse(node)} -> {ast.unparse(changed)}"
            found.append(Mutant(file, node.lineno, change, mutated.decode()))
    return found


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a syntax tree without annotations, messages of errors, and f-strings."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what `node` can be changed into; a type union or a text is no arithmetic."""
    match node:
        case ast.BinOp() if not any(map(_is_text_or_type, (node.left, node.right))):
            yield from _swapped(node, "op", node.op)
        case ast.BoolOp():
            yield from _swapped(node, "op", node.op)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.UnaryOp(op=ast.USub()):
            yield from _swapped(node, "op", node.op)
        case ast.Compare():
            for i in range(len(node.ops)):
                yield from _swapped(node, "ops", node.ops, i)
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
        case ast.Constant(value=float()):
            yield ast.Constant(node.value * 1.5 if node.value else 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in OPPOSITE:
            yield ast.Call(ast.Name(OPPOSITE[name]), node.args, node.keywords)
        case ast.Call(func=ast.Attribute(attr=name) as method) if name in OPPOSITE:
            opposite = ast.Attribute(method.value, OPPOSITE[name])
            yield ast.Call(opposite, node.args, node.keywords)


def _swapped(node: ast.AST, field: str, operators: object, i: int | None = None) -> Iterator:
    operator = operators if i is None else operators[i]  # type: ignore[index]  # a list then
    if type(operator) in SWAPPED:
        other = copy.copy(node)
        new = SWAPPED[type(operator)]()
        setattr(other, field, new if i is None else [*operators[:i], new, *operators[i + 1 :]])  # type: ignore[index]
        yield other


def _is_text_or_type(node: ast.expr) -> bool:
    match node:
        case ast.JoinedStr() | ast.Constant(value=str() | None):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in ("str", "int", "float", "bool", "bytes") or name[0].isupper()
        case ast.Subscript(value=value):
            return _is_text_or_type(value) or getattr(value, "id", "") in ("tuple", "list", "dict")
        case ast.BinOp(left=left, right=right):
            return _is_text_or_type(left) or _is_text_or_type(right)
    return False


def chosen(count: int) -> list[Mutant]:
    """Return `count` mutants, as many from each file as from any other, in an order by chance."""
    files = []
    for file in TESTS:
        mutants = mutants_of(file, (ROOT / file).read_text())
        random.Random(f"{SEED} {file}").shuffle(mutants)
        files.append(mutants)
    in_turn = [m for row in zip_longest(*files) for m in row if m is not None]
    return in_turn[:count]


class Copy:
    """A copy of the package and its tests, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tacit", "tests"):
            shutil.copytree(ROOT / name, folder / name)
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        # Compiled once here; a mutant is not, because the time in its name counts whole seconds.
        subprocess.run([sys.executable, "-m", "compileall", "-q", folder / "tacit"], check=True)
        self.environment = os.environ | {
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TACIT_DATA": os.environ.get("TACIT_DATA", str(ROOT.parent / "shared/data")),
        }

    def run(self, file: str, text: str | None, limit: float) -> tuple[str, str, float]:
        """Run the tests of `file` with `text` in its place: the result, by what, and seconds."""
        path = self.folder / file
        original = path.read_bytes()
        if text is not None:
            path.write_text(text)
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink()
        tests = [f"tests/{name}.py" for name in TESTS[file].split()]
        call = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        began = time.perf_counter()
        process = subprocess.Popen(
            [*call, file, *tests], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with the processes that a test started
            process.communicate()
            return "stopped", "", time.perf_counter() - began
        finally:
            path.write_bytes(original)
        seconds = time.perf_counter() - began
        if process.returncode == 0:
            return "survived", " ".join([file, *tests]), seconds
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return "killed", first[1] if first else output.strip()[-200:].replace("\n", " "), seconds


def read() -> list[dict[str, str]]:
    """Return the rows of the results so far."""
    if not RESULTS.is_file():
        return []
    with RESULTS.open(newline="") as stream:
        return list(csv.DictReader(stream))


def add(row: dict[str, object]) -> None:
    """Add one row to the results."""
    is_new = not RESULTS.is_file()
    with RESULTS.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS, restval="", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def version(file: str) -> str:
    """Return a name for the contents of a file and of the tests that cover it."""
    names = [file, *(f"tests/{name}.py" for name in TESTS[file].split())]
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in names)).hexdigest()[:8]


def work(count: int, seconds: float, again: bool) -> None:
    """Try the mutants that have no row yet, or all survivors if `again`, for `seconds`."""
    end = time.monotonic() + seconds
    rows = read()
    by_place = {(row["file"], row["line"], row["change"]): row for row in rows}
    unmutated = {
        (row["file"], row["version"]): float(row["seconds"])
        for row in rows
        if row["change"] == "none"
    }
    with tempfile.TemporaryDirectory() as folder:
        here = Copy(Path(folder))
        for mutant in chosen(count):
            row = by_place.get((mutant.file, str(mutant.line), mutant.change))
            name = version(mutant.file)
            is_open = row and row["result"] in ("survived", "unfinished")
            if row and not (again and is_open and row["version"] != name):
                continue
            if time.monotonic() > end - LIMIT:
                return
            if (mutant.file, name) not in unmutated:
                result, by, taken = here.run(mutant.file, None, 10 * LIMIT)
                if result != "survived":
                    raise SystemExit(f"the tests of {mutant.file} fail without a mutant: {by}")
                add({"version": name, "file": mutant.file, "line": 0, "change": "none",
                     "result": "passed", "by": by, "seconds": f"{taken:.1f}"})  # fmt: skip
                unmutated[mutant.file, name] = taken
            result, by, taken = here.run(mutant.file, mutant.text, LIMIT)
            if result == "stopped":
                is_endless = taken > ENDLESS * unmutated[mutant.file, name]
                result = "killed by time" if is_endless else "unfinished"
            add({"version": name, "file": mutant.file, "line": mutant.line,
                 "change": mutant.change, "result": result, "by": by,
                 "seconds": f"{taken:.1f}"})  # fmt: skip
            print(f"{result:14} {mutant.file}:{mutant.line} {mutant.change[:80]}", flush=True)


def summary() -> None:
    """Print how many mutants of each file were killed, at first and by the last row of each."""
    first, last = {}, {}
    for row in read():
        if row["change"] != "none":
            place = row["file"], row["line"], row["change"]
            first.setdefault(place, row)
            last[place] = row
    print("| file | tried | killed at first | killed now | survived, by judgment |")
    print("|---|---:|---:|---:|---|")
    for file in TESTS:
        killed = [sum(_is_killed(r) for r in rows.values() if r["file"] == file)
                  for rows in (first, last)]  # fmt: skip
        rest = Counter(
            row["judgment"].split(":")[0] or row["result"]
            for row in last.values()
            if row["file"] == file and not _is_killed(row)
        )
        tried = sum(place[0] == file for place in last)
        why = "; ".join(f"{n} {what}" for what, n in sorted(rest.items()))
        print(f"| `{file}` | {tried} | {killed[0]} | {killed[1]} | {why} |")


def _is_killed(row: dict[str, str]) -> bool:
    return row["result"].startswith("killed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutants", type=int, default=100, help="how many, over all files")
    parser.add_argument("--seconds", type=float, default=280, help="stop before this time is over")
    parser.add_argument("--again", action="store_true", help="try survivors with the tests of now")
    parser.add_argument("--summary", action="store_true", help="print the results so far")
    options = parser.parse_args()
    if options.summary:
        summary()
    else:
        work(options.mutants, options.seconds, options.again)
