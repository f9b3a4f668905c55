"""Imports point one way, and `import tacit` is light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tacit"

# Each part may import the parts listed and what those may import; parts of one row do not see each
# other. `tacit` itself (names and version) may be imported by the command line only.
LAYERS = [
    [
        "errors",
        "_check",
        "_lazy",
        "_arrays",
        "_participation",
        "_untrusted",
        "_file_lock",
        "_whole_file",
        "_bisection",
    ],
    ["events", "_users"],
    ["accounting", "mechanisms", "sampling"],
    ["ledger"],
    ["summaries"],
    ["_pipelines"],
    ["training", "pate", "regression", "local", "tuning", "auditing", "datasets"],
    ["sources"],
    ["experiments"],
    ["text"],
    ["report"],
    ["cli"],
    ["__main__"],
]
LEVEL = {part: level for level, row in enumerate(LAYERS) for part in row}

# Third-party packages by the lowest level (or the parts) that may import them.
LIGHT = {"numpy", "scipy"}  # from level 2 up
COMMAND_LINE = {"typer", "rich"}  # cli only
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every module that the file imports, at the top or inside a function, as full names."""
    package = ("tacit", *path.relative_to(PACKAGE).parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "tacit":
                names |= {f"tacit.{alias.name}" for alias in node.names}
            else:
                names.add(module)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            names |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return {name for name in names if isinstance(name, str)}


def _is_import_call(node: ast.Call) -> bool:
    function = node.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return name in ("import_module", "__import__")


def parts_used(path: Path) -> set[str]:
    """Parts of tacit that the file imports; a name like `tacit.Ledger` counts as `tacit` itself."""
    used = set()
    for name in imported(path):
        pieces = name.split(".")
        if pieces[0] == "tacit":
            known = len(pieces) > 1 and pieces[1] in LEVEL
            used.add(pieces[1] if known else "tacit")
    return used


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_and_never_sideways(path):
    part = part_of(path)
    if part == "__init__":
        return  # loads its parts on first use: see the tests of what `import tacit` loads
    assert part in LEVEL, f"{part} has no layer: give it one in LAYERS"
    for used in parts_used(path) - {part}:
        if used == "tacit":
            assert LEVEL[part] > LEVEL["ledger"], f"{path.name} imports the package itself"
            continue
        assert LEVEL[used] < LEVEL[part], f"{part} must not import {used}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_lower_layers_use_the_standard_library_numpy_and_scipy_only(path):
    part = part_of(path)
    level = LEVEL.get(part, 0)
    foreign = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names)
    foreign -= {"tacit"}
    if level < LEVEL["accounting"]:
        assert foreign <= ({"numpy"} if part in ("_arrays", "_users") else set())
    elif level <= LEVEL["summaries"]:
        assert foreign <= LIGHT | ({"psycopg"} if path.name == "postgres_store.py" else set())
    if part != "cli":
        assert not foreign & COMMAND_LINE


def imported_at_once(path: Path) -> set[str]:
    """Top names that importing the file imports: not those inside functions or for types only."""
    names: set[str] = set()
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").split(".")[0])
        is_lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not is_lazy and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ):
            stack.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_and_scikit_learn_load_on_use_outside_their_parts(path):
    at_once = imported_at_once(path)
    if part_of(path) not in (
        "training",
        "experiments",
        "text",
    ):  # whose doors load modules on first use
        assert "torch" not in at_once
    if part_of(path) not in ("regression", "tuning", "datasets"):  # likewise
        assert "sklearn" not in at_once


def loaded_by(statement: str) -> set[str]:
    code = f"import sys, json; {statement}; print(json.dumps(sorted(sys.modules)))"
    return set(
        json.loads(
            subprocess.check_output([sys.executable, "-c", code], text=True, cwd=PACKAGE.parent)
        )
    )


HEAVY = {"torch", "sklearn", "matplotlib", "pandas", "polars", "llvmlite"}


@pytest.mark.parametrize("name", ["tacit", "tacit.experiments"])
def test_importing_tacit_loads_no_heavy_package(name):
    assert not loaded_by(f"import {name}") & HEAVY


def test_training_loads_a_compiler_only_for_many_numbers():
    step = (
        "import torch; from tacit.training.key import Key; "
        "from tacit.training.noise import NoisyMean; "
        "mean = NoisyMean(Key.from_seed(1), expected_batch=1.0); "
        "mean.release([torch.ones(10**6)], [1.0], step=0, noise_multiplier=1.0)"
    )
    assert "llvmlite" not in loaded_by(step)


def test_pate_and_reports_need_no_torch():
    names = "LogitStudy, Recipe, RunFolder, audit_run, run_pate, sweep_pate"
    assert "torch" not in loaded_by(f"import tacit.report; from tacit.experiments import {names}")


def test_the_accounting_verbs_load_no_heavy_package():
    statement = (
        "from typer.testing import CliRunner; from tacit.cli import app; "
        "result = CliRunner().invoke(app, 'epsilon --rate 0.01 --noise-multiplier 4 "
        "--steps 10 --delta 1e-5'.split()); assert result.exit_code == 0, result.output"
    )
    assert not loaded_by(statement) & HEAVY


def cpu_seconds(statement: str) -> float:
    """CPU time of a fresh interpreter running `statement`: steadier than the clock when shared."""
    code = f"import time; {statement}; print(time.process_time())"
    runs = [
        float(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=PACKAGE.parent))
        for _ in range(5)
    ]
    return min(runs)  # whatever disturbs a run makes it longer


def test_importing_tacit_costs_little_more_than_numpy_and_scipy():
    base = cpu_seconds("import numpy, scipy.special")
    assert cpu_seconds("import numpy, scipy.special, tacit") - base < 0.4
    whole = "import tacit; tacit.epsilon; tacit.mechanisms; tacit.sampling; tacit.Ledger"
    assert cpu_seconds(whole) - base < 0.4
