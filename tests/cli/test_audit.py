"""`tacit audit` tests the mechanism of runs that fit tables: regression, Frank-Wolfe, transfer."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tacit.cli import app
from tacit.mechanisms import ExponentialMechanism, GaussianMechanism

# An audit fits few records, with much noise.
pytestmark = pytest.mark.filterwarnings("ignore:the fitted model is constant")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def regress(folder: Path, target: str, method: str) -> Path:
    table, schema = ("people", "wage") if target == "number" else ("classes", "class")
    result = call(
        "regress", folder / f"{table}.csv", "--schema", folder / f"{schema}.toml", "--epsilon", 2,
        "--method", method, "--out", folder / "run", "--no-page",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return folder / "run"


def transfer(folder: Path, *options: str) -> Path:
    result = call(
        "transfer", folder / "people.csv", folder / "people.csv", folder / "people.csv",
        "--schema", folder / "wage.toml", "--epsilon", 2, "--out", folder / "run", "--no-page",
        *options,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return folder / "run"


def audit(run: Path) -> tuple[int, dict]:
    result = call("audit", run, "--seed", 3, "--no-page", "--json")
    assert result.exit_code < 2, result.output
    return result.exit_code, json.loads((run / "audit.json").read_text())


@pytest.fixture
def short_noise(monkeypatch):
    """Four fifths of the billed noise, in vectors and in selections."""
    std, scale = GaussianMechanism.noise_std_on, ExponentialMechanism.noise_scale
    monkeypatch.setattr(GaussianMechanism, "noise_std_on", lambda self, n: 0.8 * std(self, n))
    assert isinstance(scale, property)
    short = property(lambda self: 0.8 * scale.__get__(self))
    monkeypatch.setattr(ExponentialMechanism, "noise_scale", short)


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("number", "adassp"),
        pytest.param("number", "frank-wolfe", marks=pytest.mark.slow),
        pytest.param("classes", "gradient", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_regression_is_audited(folder, target, method):
    code, found = audit(regress(folder, target, method))
    assert code == 0
    names = {test["name"] for test in found["mechanism"]["tested"]}
    assert "a record moves a value by its sensitivity at most" in names
    assert "the bill covers every release" in names
    assert found["family_wise_error"] == 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("number", "functional"),
        ("number", "gradient"),
        ("classes", "gradient"),
        ("classes", "frank-wolfe"),
    ],
    ids=str,
)
def test_other_regressions_are_audited(folder, target, method):
    code, found = audit(regress(folder, target, method))
    assert code == 0
    assert found["mechanism"]["passes"]


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--overlapping",), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.slow
def test_a_transfer_is_audited(folder, options):
    code, found = audit(transfer(folder, *options))
    assert code == 0
    assert {test["part"] for test in found["mechanism"]["tested"]} == {"transfer"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adassp", "frank-wolfe"])
def test_too_little_noise_of_a_regression_is_found(folder, method, short_noise):
    assert audit(regress(folder, "number", method))[0] == 1


@pytest.mark.slow
def test_too_little_noise_of_a_transfer_is_found(folder, short_noise):
    assert audit(transfer(folder))[0] == 1


@pytest.mark.slow
def test_a_transfer_that_forgets_a_file_in_its_bill_is_found(folder, monkeypatch):
    from tacit.regression import TransferRegression

    run = transfer(folder, "--overlapping")
    monkeypatch.setattr(TransferRegression, "_whole", lambda self, events: events[0])
    assert audit(run)[0] == 1


@pytest.mark.slow
def test_objective_perturbation_is_refused(folder):
    result = call("audit", regress(folder, "classes", "objective"), "--no-page")
    assert result.exit_code == 2
    assert "objective perturbation cannot be audited" in result.output
