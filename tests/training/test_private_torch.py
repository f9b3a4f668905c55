"""Private names of torch: used in two fenced places; where they are missing, a run says so."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tacit

PACKAGE = Path(tacit.__file__).parent
FENCED = (
    "training/gpu/",
    "training/torch_internals.py",
)
NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}  # documented, despite the underscore


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_names(trees):
    """Names with an underscore that tacit itself defines: methods, attributes, globals."""
    found = set(NAMED_TUPLES)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def private_uses(tree, own):
    """Private names of torch in a file: imported, read as attributes, or named in getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in own and not is_own(node.value):
                yield node.lineno, node.attr
            continue
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
            for name in (a.value for a in node.args[1:2] if isinstance(a, ast.Constant)):
                if is_private(name) and name not in own:
                    yield node.lineno, name
            continue
        else:
            continue
        for name in names:
            root, *parts = name.split(".")
            if root == "torch" and any(map(is_private, parts)):
                yield node.lineno, name


def is_own(value):
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def test_private_names_of_torch_are_fenced():
    paths = sorted((PACKAGE / "training").rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    own = own_names(trees.values())
    uses = {
        f"{path.relative_to(PACKAGE).as_posix()}:{line} {name}"
        for path, tree in trees.items()
        for line, name in private_uses(tree, own)
    }
    assert any(use.startswith(FENCED[1]) for use in uses)  # the scanner sees what is there
    assert [use for use in sorted(uses) if not use.startswith(FENCED)] == []


def test_other_packages_import_no_private_name_of_torch():
    for path in PACKAGE.rglob("*.py"):
        if "training" not in path.parts:
            for _, name in private_uses(ast.parse(path.read_text(encoding="utf-8")), set()):
                assert not name.startswith("torch."), f"{path}: {name}"


# Hides every private name of every torch module from tacit, as a version of torch without them
# would: reading one raises AttributeError, importing one raises ImportError.
HIDE = """
    import builtins, sys, torch, torch.distributed.tensor, torch.utils.checkpoint

    def is_private(name):
        return name.startswith("_") and not name.startswith("__")

    def from_tacit(depth):
        return sys._getframe(depth + 1).f_globals.get("__name__", "").startswith("tacit")

    def guarded(kind):
        class Guarded(kind):
            def __getattribute__(self, name):
                if is_private(name) and from_tacit(1):
                    raise AttributeError(f"{name} is hidden")
                return super().__getattribute__(name)
        return Guarded

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch":
            try:
                module.__class__ = guarded(type(module))
            except (TypeError, AttributeError):
                pass  # not a plain module
    real = builtins.__import__

    def hiding(name, globals=None, locals=None, fromlist=(), level=0):
        asker = (globals or {}).get("__name__", "")
        parts = [*name.split("."), *(fromlist or ())]
        if asker.startswith("tacit") and parts[0] == "torch" and any(map(is_private, parts)):
            raise ImportError(f"{name} is hidden")
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = hiding
"""

TRAIN = """
    import tacit
    from tacit.training import Speed
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")

    def run(*layers, steps=3, **options):
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(64, 4), torch.arange(64) % 2
        private = tacit.make_private(model, optimizer, data, loss_fn, batch_size=16, steps=steps,
                                     clip_norm=1.0, noise_multiplier=1.0, **options)
        return model, optimizer, private

    for layers in (
        (nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2)),
        (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(),
         nn.Linear(4, 2)),
        (Checkpointed(4, 8), nn.Tanh(), nn.Linear(8, 2)),
    ):
        for speed in (Speed(), Speed(max_microbatch=5)):
            model, optimizer, private = run(*layers, speed=speed)
            for lot in private:
                private.step(lot)
            private.state_dict()
        model, optimizer, private = run(*layers)
        for _ in private:
            private.backward()
            optimizer.step()
        assert all(torch.isfinite(p).all() for p in model.parameters())
    print("trained")
"""


def ran(*sources):
    code = "\n".join(map(textwrap.dedent, sources))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_torch_without_these_names_is_refused_in_one_sentence():
    end = """
        except tacit.errors.IncompatibleModel as error:
            print(error)
    """
    train = textwrap.indent(textwrap.dedent(TRAIN), "    ")
    assert "checked with torch 2.13: use that version" in ran(
        HIDE, "import tacit\ntry:" + train, end
    )


@pytest.mark.slow
def test_a_cpu_never_imports_the_gpu_package():
    loaded = "print([name for name in sys.modules if name.startswith('tacit.training.gpu')])"
    assert ran("import sys, torch", TRAIN, loaded).splitlines()[-1] == "[]"
