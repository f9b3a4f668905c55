"""Measures of how the package is laid out: `python tests/structure.py` prints each of them.

`tests/test_structure.py` holds them to their bounds, so that the package stays easy to navigate.
"""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "tacit"

# Where a newcomer finds each algorithm: the file's name says it.
ALGORITHMS = {
    "DP-SGD step": "training/private.py",
    "book-keeping": "training/engines/bookkeeping.py",
    "ghost norm": "training/gradients/ghost_norm.py",
    "vmap engine": "training/engines/vmap.py",
    "automatic clipping (AUTO-S)": "training/automatic_clipping.py",
    "adaptive clipping": "training/adaptive_clipping.py",
    "DP-Adam with bias correction": "training/adam.py",
    "moments accountant": "accounting/moments.py",
    "RDP": "accounting/rdp/__init__.py",
    "PLD": "accounting/pld/__init__.py",
    "Gaussian DP": "accounting/gdp.py",
    "strong composition": "accounting/composition.py",
    "basic composition": "accounting/composition.py",
    "calibration": "accounting/calibrate.py",
    "RDP filter": "ledger/filter.py",
    "Poisson sampling": "sampling.py",
    "functional mechanism": "regression/functional.py",
    "AdaSSP": "regression/adassp.py",
    "noisy gradient descent": "regression/gradient.py",
    "objective perturbation": "regression/objective.py",
    "Frank-Wolfe": "regression/frank_wolfe.py",
    "transfer": "regression/transfer.py",
    "PATE classifier": "pate/classifier.py",
    "GNMax": "pate/gnmax.py",
    "Laplace noisy max": "pate/laplace_max.py",
    "one-run audit": "auditing/one_run.py",
    "LiRA": "auditing/lira.py",
    "canaries": "auditing/canaries.py",
    "inversion": "auditing/inversion.py",
    "exponential mechanism": "mechanisms/exponential.py",
    "discrete Gaussian": "mechanisms/discrete.py",
}


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def n_lines(path: Path) -> int:
    """Count the lines of one file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def findable() -> list[str]:
    """Return the algorithms whose file is there."""
    return [name for name, place in ALGORITHMS.items() if (PACKAGE / place).is_file()]


def imports_of(name: str, *, lazy: bool = True) -> set[str]:
    """Return the modules of tacit that a module imports; without `lazy`, at import time only."""
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in _nodes(tree, lazy=lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules() else node.module)
    return {module for module in found if module in modules()}


def _nodes(tree: ast.AST, *, lazy: bool) -> list[ast.AST]:
    """Return the nodes of `tree`, except those that run later or for type checkers only."""
    stack, found = [tree], []
    while stack:
        node = stack.pop()
        found.append(node)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if lazy or not (is_function or is_for_types):
            stack.extend(ast.iter_child_nodes(node))
    return found


def part_of(name: str) -> str:
    """Return the top-level part of tacit that a module belongs to."""
    return name.split(".")[1] if "." in name else name


def skipped_doors() -> list[str]:
    """List imports that reach into another package past its `__init__`."""
    packages = {part_of(name) for name, path in modules().items() if path.name == "__init__.py"}
    return [
        f"{name} imports {used}"
        for name in modules()
        for used in sorted(imports_of(name))
        if used.count(".") > 1 and part_of(used) in packages and part_of(used) != part_of(name)
        # `from tacit.accounting import calibrate` gives the function called like its module.
        if not _is_at_door(used)
    ]


def _is_at_door(module: str) -> bool:
    door, _, name = module.rpartition(".")
    tree = ast.parse(modules()[door].read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == module
        and any(alias.name == name for alias in node.names)
        for node in ast.walk(tree)
    )


def import_depth(package: str) -> list[str]:
    """Return the longest chain of imports among the modules of `tacit.<package>`."""
    inside = {name for name in modules() if name.startswith(f"tacit.{package}.")}
    graph = {name: imports_of(name, lazy=False) & inside - {name} for name in inside}

    @cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max((chain(used) for used in graph[name]), key=len, default=()))

    return list(max((chain(name) for name in inside), key=len))


def repeated_files() -> dict[str, list[str]]:
    """Return base names of files that occur more than once, doors and verbs apart."""
    by_name = defaultdict(list)
    for path in modules().values():
        place = path.relative_to(PACKAGE)
        if path.stem not in ("__init__", "__main__") and place.parts[0] != "cli":
            by_name[path.stem].append(place.as_posix())
    return {name: places for name, places in by_name.items() if len(places) > 1}


def repeated_classes() -> dict[str, list[str]]:
    """Return class names that are defined in more than one module; an underscore does not count."""
    by_name = defaultdict(list)
    for name, path in modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                by_name[node.name.strip("_")].append(name)
    return {name: places for name, places in by_name.items() if len(places) > 1}


def report() -> None:
    """Print every measure."""
    depth = import_depth("training")
    print(f"files / lines of tacit/: {len(modules())} / {sum(map(n_lines, modules().values()))}")
    print(f"algorithms found by file name: {len(findable())} of {len(ALGORITHMS)}")
    for name in ALGORITHMS.keys() - set(findable()):
        print(f"    not found: {name}")
    private = "tacit.training.private"
    print(f"lines of private.py: {n_lines(modules()[private])}")
    print(f"imports of private.py from tacit: {len(imports_of(private))}")
    print(f"import depth of training: {len(depth)}: {' < '.join(reversed(depth))}")
    doors = skipped_doors()
    print(f"imports that skip a door: {len(doors)}", *doors, sep="\n    ")
    for kind, found in (("file", repeated_files()), ("class", repeated_classes())):
        print(f"{kind} names that occur twice: {len(found)}")
        for name, places in found.items():
            print(f"    {name}: {', '.join(places)}")


if __name__ == "__main__":
    report()
