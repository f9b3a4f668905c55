"""What users install: the source distribution and the wheel, in a fresh environment."""

import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command, **options) -> str:
    found = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Folder with the source distribution and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


def test_both_distributions_hold_every_module_and_nothing_private(built):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tacit").rglob("*.py")}
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    in_wheel = set(ZipFile(wheel).namelist())
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    assert modules <= in_wheel
    assert modules <= in_source
    assert not any(name.startswith(("tests", "shared", "benchmarks")) for name in in_wheel)


@pytest.mark.slow
def test_the_core_works_in_a_fresh_environment_without_extras(built, tmp_path):
    venv.create(tmp_path / "fresh", with_pip=True)
    bin_ = tmp_path / "fresh" / "bin"
    (wheel,) = built.glob("*.whl")
    pip = (bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    tacit = bin_ / "tacit"
    priced = run(
        tacit, "epsilon", "--rate", 0.01, "--noise-multiplier", 4, "--steps", 10000,
        "--delta", 1e-5, cwd=tmp_path,
    )  # fmt: skip
    assert "0.9" in priced
    found = run(
        tacit, "calibrate", "--epsilon", 3, "--delta", 1e-5, "--rate", 0.01, "--steps", 1000,
        cwd=tmp_path,
    )  # fmt: skip
    assert "noise multiplier" in found.replace("-", " ").lower()
    assert "train" in run(tacit, "--help", cwd=tmp_path)
    code = "import tacit; print(tacit.Ledger(budget=tacit.Budget(epsilon=1.0, delta=1e-6)))"
    assert "Ledger" in run(bin_ / "python", "-c", code, cwd=tmp_path)
