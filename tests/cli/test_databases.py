"""Verbs of the command line on tables in databases, whose rows stay there."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from tacit import Budget, Ledger
from tacit.cli import app

duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
COLUMNS = """
[columns]
"patient id" = "person"
age = [18, 90]
pay = [0, 4]
ill = "boolean"
"""


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    """Return a folder with a database, three schemas and a ledger of persons."""
    rng, n = np.random.default_rng(0), 3000
    visits = pa.table({  # noqa: F841  # DuckDB reads the variable
        "patient id": [None if k % 500 == 0 else k // 3 for k in range(n)],
        "age": rng.uniform(18, 90, n),
        "pay": rng.uniform(0, 4, n),
        "ill": rng.random(n) < 0.3,
    })  # fmt: skip
    with duckdb.connect(str(tmp_path / "clinic.db")) as connection:
        connection.execute("CREATE TABLE visits AS FROM visits")
        connection.execute("CREATE TABLE nobody AS FROM visits LIMIT 0")
    for target in ("pay", "ill"):
        (tmp_path / f"{target}.toml").write_text(f'target = "{target}"\n{COLUMNS}')
    records = COLUMNS.replace('"patient id" = "person"\n', "")
    (tmp_path / "records.toml").write_text(f'target = "pay"\n{records}')
    Ledger(tmp_path / "p.ledger", Budget(9.0, 1e-5), unit="person").close()
    return tmp_path


def call(verb: str, clinic: Path, *options: object, table: str = "visits") -> Result:
    fixed = [verb, f"duckdb:{clinic}/clinic.db#{table}", "--epsilon", 1, "--out", clinic / "run"]
    fixed += ["--no-evaluation"] if verb == "regress" else []
    return CliRunner().invoke(app, list(map(str, [*fixed, *options])))


def paid(clinic: Path) -> int:
    with Ledger(clinic / "p.ledger", read_only=True) as ledger:
        return len(ledger.history())


@pytest.mark.parametrize(
    ("verb", "schema", "most"),
    [
        pytest.param("regress", "pay", 2, marks=pytest.mark.slow),
        pytest.param("regress", "pay", 1, marks=pytest.mark.slow),
        pytest.param("regress", "ill", 3, marks=pytest.mark.slow),
        pytest.param("summarize", "pay", 2, marks=pytest.mark.slow),
    ],
)
def test_several_records_of_a_person_are_paid_for_as_a_person(clinic, verb, schema, most):
    options = ["--schema", clinic / f"{schema}.toml", "--ledger", clinic / "p.ledger"]
    done = call(verb, clinic, *options, "--records-per-person", most)
    assert done.exit_code == 0, done.output
    facts = json.loads((clinic / "run" / "facts.json").read_text())
    assert facts["records_per_person"] == most
    assert facts["unit"] == "person"
    assert facts["epsilon"] <= 1
    if verb == "regress":  # its number of records is assumed public, and is that of those kept
        assert facts["n_records"] == {1: 1000, 2: 2000}.get(most, 2994)
    assert CliRunner().invoke(app, ["verify", str(clinic / "run")]).exit_code == 0


def test_a_person_with_several_records_is_the_unit_of_the_facts(clinic):
    options = ["--schema", clinic / "pay.toml", "--ledger", clinic / "p.ledger", "--no-page"]
    done = call("regress", clinic, *options, "--records-per-person", 2)
    assert done.exit_code == 0, done.output
    facts = json.loads((clinic / "run" / "facts.json").read_text())
    assert facts["records_per_person"] == 2
    assert "number of records" in facts["assumed_public"]


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("Use method='adassp'", ["--schema", "pay.toml", "--method", "gradient"]),
        ("delta must be in", ["--schema", "ill.toml", "--delta", "0"]),
        ("needs a column of type person", ["--schema", "records.toml", "--records-per-person", 2]),
    ],
)
def test_a_fit_that_cannot_be_made_is_refused_before_anything_is_paid(clinic, message, options):
    given = [clinic / o if str(o).endswith(".toml") else o for o in options]
    done = call("regress", clinic, *given, "--ledger", clinic / "p.ledger")
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
    assert paid(clinic) == 0
    assert not (clinic / "run").exists()


def test_a_table_without_records_is_refused(clinic):
    options = ["--schema", clinic / "pay.toml", "--ledger", clinic / "p.ledger"]
    assert "nobody has no records" in call("regress", clinic, *options, table="nobody").output


def test_an_address_with_a_password_is_written_nowhere(clinic):
    for address in ("ana:s3cret@h/d#t", "ana@h/d?password=s3cret#t", "h/d?a=1&sslpassword=s3cret"):
        place = f"postgresql://{address}"
        given = ["summarize", place, "--schema", clinic / "pay.toml", "--epsilon", 1]
        given += ["--out", clinic / "run"]
        done = CliRunner().invoke(app, list(map(str, given)))
        assert "without a password" in " ".join(done.output.split())
        assert "s3cret" not in done.output
        assert not (clinic / "run").exists()
