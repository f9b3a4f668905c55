"""What users install: the source distribution and the wheel, under a name of their own."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import install_lines
import pytest

from tacit import __version__
from tacit.cli import _install

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


def test_wheel_and_source_are_called_tacit_dp(built):
    stem = f"tacit_dp-{__version__}"
    expected = [f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"]
    assert sorted(path.name for path in built.iterdir()) == expected
    with ZipFile(built / expected[0]) as wheel:
        metadata = wheel.read(f"{stem}.dist-info/METADATA").decode()
    assert "\nName: tacit-dp\n" in metadata
    assert f"\nVersion: {__version__}\n" in metadata
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the list of files comes from git")
def test_no_file_sends_anybody_to_the_other_package():
    assert install_lines.found() == []


NAME = "tacit"  # written apart, so that the check does not find its own examples


@pytest.mark.parametrize(
    "line",
    [
        f"pip install {NAME}",
        f"python -m pip install -q -U '{NAME}'",
        f"    pip3 install -c constraints.txt \\\n        {NAME}  # and more",
        f"run `uv add {NAME}` first",
        f"uv pip install {NAME}",
        f'"Run: pip install "\n    f"{NAME} for it"',
        f"uvx {NAME} demo",
        f"poetry add pandas {NAME}",
        f"pip install 'x[y]' \"{NAME}[torch]\"",
        f"also: {NAME}[dask]",
        f"needs {NAME}>=0.2",
        f"{NAME} == 0.2.0",
        f'importlib.metadata.version("{NAME}")',
        f"https://pypi.org/project/{NAME}/",
        f"https://img.shields.io/pypi/v/{NAME}.svg",
    ],
)
def test_the_check_finds_the_other_name_and_accepts_ours(line):
    assert list(install_lines.foreign_lines(line, "README.md"))
    ours = line.replace(NAME, "tacit-dp")
    assert not list(install_lines.foreign_lines(ours, "README.md"))


@pytest.mark.parametrize(
    "line",
    [
        f"{NAME} epsilon --rate 0.01",
        f"import {NAME}",
        f"pip install . && {NAME} demo",
        f"pip install '.[torch]'\n{NAME} demo",
        f"pip uninstall --yes {NAME}",
        f"pip install lightning for {NAME}.training",
        f"python -m pip install dist/x.whl; python -m {NAME} demo",
    ],
)
def test_the_check_leaves_imports_and_commands_alone(line):
    assert not list(install_lines.foreign_lines(line, "README.md"))


def test_a_requirement_may_stand_alone_on_its_line():
    assert list(install_lines.foreign_lines(f"numpy\n{NAME}\n", "docs/requirements.txt"))
    assert not list(install_lines.foreign_lines(f"numpy\n{NAME}-dp\n", "requirements.txt"))


@pytest.mark.parametrize("module", ["torch", "sklearn.svm", "duckdb", "nonsense", None])
def test_messages_about_missing_packages_install_ours(module):
    assert not list(install_lines.foreign_lines(_install(module), "message"))
    assert "pip install 'tacit-dp[" in _install(module)


@pytest.mark.parametrize("remains", [True, False], ids=["installed over ours", "and removed"])
def test_the_command_says_when_the_other_package_took_our_place(tmp_path, remains):
    """The other package has `__init__.py` and `errors.py`, as ours; its removal deletes both."""
    folder = tmp_path / "tacit"
    shutil.copytree(ROOT / "tacit", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py"):
        (folder / name).unlink()
        if remains:
            (folder / name).write_text('__version__ = "0.3.0"\n__all__ = ["Schema"]\n')
    code = (  # an editable install of ours would come before a package without `__init__`
        "import os, sys; is_ours = lambda path: os.path.isdir(path + '/tacit'); "
        "sys.path[1:] = [path for path in sys.path[1:] if not is_ours(path)]; "
        "from tacit.cli import main; main()"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "pip uninstall --yes tacit && pip install" in result.stderr
    assert result.stderr.endswith("tacit-dp\n")


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
