"""How far a reader has to go: files and frames of one step, import depth, size of `private.py`."""

import ast
import inspect
import sys
from functools import cache
from pathlib import Path

import tacit
from tacit.training import record_loop
from tacit.training.program import mapped

PACKAGE = Path(tacit.__file__).parent
TRAINING = PACKAGE / "training"
CONTRACTION = "weighted_sum"  # where clipped gradients become matrix products


def traced_step(private, lot):
    """Files of tacit that a step enters, and the deepest chain of calls to the contraction."""
    files, stack, deepest = set(), [], []

    def look(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        if event == "call":
            files.add(Path(code.co_filename).relative_to(PACKAGE).as_posix())
            stack.append(code.co_qualname)
            if code.co_name == CONTRACTION and len(stack) > len(deepest):
                deepest[:] = stack
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(look)
    try:
        private.step(lot)
    finally:
        sys.setprofile(None)
    return files, deepest


def test_one_step_enters_few_files_and_frames(problem):
    private = problem().private  # two linear layers, on the CPU
    lots = iter(private)
    private.step(next(lots))  # the first step also traces the model and opens the plan
    private.step(next(lots))  # the second one marks a block of steps in the ledger
    files, frames = traced_step(private, next(lots))
    # 22 with the engine that intercepted operators: the traced program compares Python's state
    # before each lot, and payments, turns and position are objects of their own.
    assert len(files) <= 33, " ".join(sorted(files))
    assert frames[0] == "Private.step"
    assert len(frames) <= 8, " > ".join(frames)


def tacit_imports(path):
    """Modules of tacit that a file imports when it is loaded itself: not on use, not for types."""
    found, nodes = set(), list(ast.parse(path.read_text(encoding="utf-8")).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            nodes += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            nodes += node.body
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("tacit")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tacit"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if is_module(name) else node.module)
    return found


def is_module(name):
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def test_imports_inside_training_are_not_deep():
    modules = {}
    for path in TRAINING.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    @cache
    def chain(name):
        below = [n for n in tacit_imports(modules[name]) if n in modules and n != name]
        longest = max((chain(n) for n in below), key=len, default=())
        return (*longest, name)

    deepest = max(map(chain, modules), key=len)
    assert len(deepest) <= 14, " < ".join(deepest)  # 12 without the traced program


def test_the_file_of_the_step_is_short_and_depends_on_little():
    path = TRAINING / "private.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 470  # all of `Private`: it inherits nothing
    assert len(tacit_imports(path)) <= 24  # what guards a step is called, not inherited


def test_rules_know_nothing_of_the_program():
    imported = {name for path in TRAINING.joinpath("rules").glob("*.py") for name in all_of(path)}
    assert imported
    assert not [name for name in imported if name.startswith("tacit.training.program")]


def all_of(path):
    """Modules that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_both_ways_to_sum_take_the_examples_and_the_clip_rule():
    for run in (mapped.run, record_loop.run):
        kinds = [p.kind for p in inspect.signature(run).parameters.values()]
        assert sum(kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds) <= 3


def test_the_step_is_on_a_screen():
    """From the call to the optimizer's step: at most 80 lines, in one file, one after the other."""
    private = tacit.training.Private
    step, release = (inspect.getsourcelines(getattr(private, name)) for name in STEP)
    assert step[1] + len(step[0]) + 1 == release[1]
    assert len(step[0]) + len(release[0]) <= 80


STEP = ("step", "_pay_and_release")
