"""Measures of how the package is laid out: `python tests/structure.py` prints each of them.

`tests/test_structure.py` holds them to their bounds, so that the package stays easy to navigate.
"""

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "tacit"

# Where a newcomer finds each algorithm: the file's name says it.
ALGORITHMS = {
    "DP-SGD step": "training/private.py",
    "one program per example": "training/program/one_example.py",
    "ghost norm": "training/rules/ghost_norm.py",
    "one record at a time": "training/record_loop.py",
    "automatic clipping (AUTO-S)": "training/clipping/automatic_clipping.py",
    "adaptive clipping": "training/clipping/adaptive_clipping.py",
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


@cache
def text(name: str) -> str:
    """Return the source of a module. A module is read and parsed once, since nothing changes it."""
    return modules()[name].read_text(encoding="utf-8")


@cache
def tree(name: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(text(name))


@cache
def nodes(name: str) -> list[ast.AST]:
    """Return every node of a module."""
    return list(ast.walk(tree(name)))


def n_lines(name: str) -> int:
    """Count the lines of a module."""
    return len(text(name).splitlines())


class Size(NamedTuple):
    """Statements and syntax nodes; texts that stand alone, such as docstrings, are left out."""

    statements: int
    nodes: int


def sizes() -> dict[str, Size]:
    """Return the size of each part of tacit; modules beside the packages are the part `top`."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, path in modules().items():
        where = path.relative_to(PACKAGE).parts
        count = counts[where[0] if where[1:] else "top"]
        kept = [node for node in nodes(name) if not _is_text(node)]
        count[0] += sum(isinstance(node, ast.stmt) for node in kept)
        count[1] += len(kept)
    return {part: Size(*count) for part, count in sorted(counts.items())}


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def whole_size() -> Size:
    """Return the size of the package."""
    return Size(*map(sum, zip(*sizes().values(), strict=True)))


def data_bytes() -> int:
    """Return the size of the files that are not Python: tables must not hide there."""
    return sum(
        path.stat().st_size
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    )


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of nodes that reach each other, largest first; single nodes are left out."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        stack, seen = [start], set()
        while stack:
            for node in graph[stack.pop()] - seen:
                seen.add(node)
                stack.append(node)
        reached[start] = seen
    found = {
        frozenset({name, *(other for other in reached[name] if name in reached[other])})
        for name in graph
    }
    return sorted((set(cycle) for cycle in found if len(cycle) > 1), key=len, reverse=True)


def all_imports() -> dict[str, set[str]]:
    """Return what each module imports from tacit, also inside functions and for types."""
    return {name: imports_of(name) for name in modules()}


def public_names() -> dict[str, int]:
    """Count the names of `__all__` by part, and where it is missing, what a module defines."""
    found = {}
    for name in modules():
        depth, part = name.count("."), name.split(".")[-1]
        if depth < 2 and not part.startswith("_") and part != "cli":
            found[part] = len(_listed(name) or _defined(name))
    return {part: count for part, count in found.items() if count}


def _listed(name: str) -> set[str]:
    """Return the names of `__all__`; a name of another list in it counts as one."""
    for node in tree(name).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.List), f"{name}: `__all__` must be a list"
            return {ast.unparse(element) for element in node.value.elts}
    return set()


def _defined(name: str) -> set[str]:
    kinds = ast.ClassDef | ast.FunctionDef
    defined = {node.name for node in tree(name).body if isinstance(node, kinds)}
    return {found for found in defined if not found.startswith("_")}


def options() -> dict[str, int]:
    """Count the options of each verb of the command line, without `--help`."""
    import typer

    from tacit.cli import VERBS, app

    group = typer.main.get_command(app)

    def count(name: str, command) -> Iterator[tuple[str, int]]:
        for inner, part in getattr(command, "commands", {}).items():
            yield from count(f"{name} {inner}", part)
        if not hasattr(command, "commands"):
            yield name, sum(kind.param_type_name == "option" for kind in command.params)

    return dict(pair for verb in VERBS for pair in count(verb, group.get_command(None, verb)))


def methods(module: str, name: str) -> list[str]:
    """Return the methods of a class, with those of the classes of tacit that it inherits from.

    A method that is overridden occurs once for each of its bodies.
    """
    node = next(n for n in tree(module).body if isinstance(n, ast.ClassDef) and n.name == name)
    found = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
    for base in node.bases:
        home = _home(module, ast.unparse(base).partition("[")[0])
        if home is not None:
            found += methods(*home)
    return found


def _home(module: str, name: str) -> tuple[str, str] | None:
    """Return module and name of a class as it was defined; None for a class from elsewhere."""
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree(module).body):
        return module, name
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom) and node.module in modules():
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _home(node.module, alias.name)
    return None


def all_methods() -> Counter[str]:
    """Count the methods of every class of the package, with those that it inherits."""
    return Counter(
        {
            f"{name}.{node.name}": len(methods(name, node.name))
            for name in modules()
            for node in tree(name).body
            if isinstance(node, ast.ClassDef)
        }
    )


def parameters(module: str, function: str) -> int:
    """Count the parameters of a function."""
    for node in tree(module).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
    raise LookupError(f"{module} has no function {function}.")


def bodies() -> dict[str, int]:
    """Return the lines of each function's body, without its docstring, by place and name."""
    return {
        f"{name}:{node.lineno} {node.name}": (node.end_lineno or 0) - _first(node).lineno + 1
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    return node.body[1] if ast.get_docstring(node) and node.body[1:] else node.body[0]


def percentile(values: list[int], share: float) -> int:
    """Return the value that `share` of all values do not exceed."""
    return sorted(values)[int(share * len(values))]


def measures() -> dict[str, float]:
    """Return every measure that has a bound."""
    size, rings, lines = whole_size(), cycles(all_imports()), list(bodies().values())
    verbs = options()
    return {
        "statements": size.statements,
        "nodes per statement": round(size.nodes / size.statements, 3),
        "bytes of data files": data_bytes(),
        "largest cycle": max(map(len, rings), default=0),
        "modules in cycles": sum(map(len, rings)),
        "public names": sum(public_names().values()),
        "verbs": len(verbs),
        "options": sum(verbs.values()),
        "methods of Private": len(methods("tacit.training.private", "Private")),
        "parameters of make_private": parameters("tacit.training.make", "make_private"),
        "lines of private.py": n_lines("tacit.training.private"),
        "imports of private.py": len(imports_of("tacit.training.private")),
        "import depth of training": len(import_depth("training")),
        "lines of a file": max(map(n_lines, modules())),
        "median of bodies": int(statistics.median(lines)),
        "95th percentile of bodies": percentile(lines, 0.95),
        "longest body": max(lines),
    }


def findable() -> list[str]:
    """Return the algorithms whose file is there."""
    return [name for name, place in ALGORITHMS.items() if (PACKAGE / place).is_file()]


def imports_of(name: str, *, lazy: bool = True) -> set[str]:
    """Return the modules of tacit that a module imports; without `lazy`, at import time only."""
    found: set[str] = set()
    for node in nodes(name) if lazy else _at_once(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules() else node.module)
    return {module for module in found if module in modules()}


def _at_once(root: ast.AST) -> list[ast.AST]:
    """Return the nodes of a module, except those that run later or for type checkers only."""
    stack, found = [root], []
    while stack:
        node = stack.pop()
        found.append(node)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not (is_function or is_for_types):
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
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == module
        and any(alias.name == name for alias in node.names)
        for node in nodes(door)
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
    for name in modules():
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef):
                by_name[node.name.strip("_")].append(name)
    return {name: places for name, places in by_name.items() if len(places) > 1}


def report() -> None:
    """Print every measure."""
    print(f"files / lines of tacit/: {len(modules())} / {sum(map(n_lines, modules()))}")
    for name, value in measures().items():
        print(f"{name}: {value}")
    print("statements, nodes and public names by part:")
    names = public_names()
    for part, size in sorted(sizes().items(), key=lambda item: -item[1].statements):
        print(f"    {part}: {size.statements}, {size.nodes}, {names.get(part, '-')}")
    print("cycles of all imports:", ", ".join(str(len(ring)) for ring in cycles(all_imports())))
    print("most methods, with those inherited:", all_methods().most_common(5))
    print("most options:", Counter(options()).most_common(5))
    depth = import_depth("training")
    print(f"deepest import of training: {' < '.join(reversed(depth))}")
    print(f"algorithms found by file name: {len(findable())} of {len(ALGORITHMS)}")
    for name in ALGORITHMS.keys() - set(findable()):
        print(f"    not found: {name}")
    doors = skipped_doors()
    print(f"imports that skip a door: {len(doors)}", *doors, sep="\n    ")
    for kind, found in (("file", repeated_files()), ("class", repeated_classes())):
        print(f"{kind} names that occur twice: {len(found)}")
        for name, places in found.items():
            print(f"    {name}: {', '.join(places)}")


if __name__ == "__main__":
    report()
