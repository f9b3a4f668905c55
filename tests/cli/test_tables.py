"""Tables from end to end: a wrong schema or file is stopped by one sentence, before it costs."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from typer.testing import CliRunner, Result

from tacit import Budget, Ledger
from tacit.cli import app
from tacit.datasets import Schema
from tacit.errors import TacitError
from tacit.experiments import Recipe, shipped

SECRET = "Jane-Doe-HIV"
EPSILON = 1.0
SCHEMA = {
    "target": "sick",
    "columns": {
        "age": [18, 90],
        "town": ["Köln", "Bonn", "Aachen"],
        "visits": [0, 40],
        "sick": ["no", "yes"],
        "note": "ignored",
    },
}
VERBS = ("summarize", "train", "regress", "pate", "transfer")
MOST_VERBS = [  # one of them in every run of the tests
    "regress", *(pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS if verb != "regress")
]  # fmt: skip


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def lines(n: int = 4000, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    rows = ["age,town,visits,sick,note"]
    for age, town, visits in zip(
        rng.integers(18, 90, n), rng.choice(["Köln", "Bonn", "Aachen"], n), rng.integers(0, 40, n),
        strict=True,
    ):  # fmt: skip
        rows.append(f"{age},{town},{visits},{'yes' if age + visits > 70 else 'no'},{SECRET}")
    return rows


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.toml").write_text(tomli_w.dumps(SCHEMA), encoding="utf-8")
    (tmp_path / "good.csv").write_text("\n".join(lines()) + "\n", encoding="utf-8")
    (tmp_path / "public.csv").write_text("\n".join(lines(300, 1)) + "\n", encoding="utf-8")
    Ledger(tmp_path / "a.ledger", Budget(2 * EPSILON, 1e-5)).close()
    return tmp_path


def run_verb(verb: str, table: Path, schema: Path, *more: object) -> Result:
    files = [table]
    if verb == "transfer":  # it needs a number as target, and another table
        files.append(Path("good.csv"))
        text = schema.read_text(encoding="utf-8")
        schema = schema.with_name("number.toml")
        schema.write_text(text.replace('target = "sick"', 'target = "age"'), encoding="utf-8")
    options = [verb, *files, "--schema", schema, "--epsilon", EPSILON, "--ledger", "a.ledger"]
    options += {"pate": ["--public-test", "public.csv", "--out", "run", "--no-page", "--queries", 9,
                         "--noise", 60],
                "summarize": ["--out", "run"]}.get(verb, ["--out", "run", "--no-page"])  # fmt: skip
    return call(*options, *more)


def wrong_categories(rows, schema):
    schema["columns"]["town"] = ["Koeln", "Bohn", "Aix"]


def wrong_target_classes(rows, schema):
    schema["columns"]["sick"] = ["healthy", "ill"]


def wrong_bounds(rows, schema):
    schema["columns"]["age"] = [0, 1]


def swapped_columns(rows, schema):
    rows[0] = "town,age,visits,sick,note"


def swapped_numbers(rows, schema):
    schema["columns"] |= {"age": [0, 17], "visits": [18, 90]}


def wrong_separator(rows, schema):
    rows[:] = [row.replace(",", ";") for row in rows]


def separator_of_the_rows_alone(rows, schema):
    rows[1:] = [row.replace(",", ";") for row in rows[1:]]


def missing_column(rows, schema):
    rows[:] = [row.split(",", 1)[1] for row in rows]


def renamed_column(rows, schema):
    rows[0] = "Age,town,visits,sick,note"


def header_only(rows, schema):
    del rows[1:]


def nothing(rows, schema):
    rows.clear()


def no_header(rows, schema):
    del rows[0]


def unclosed_quotes(rows, schema):
    rows[1:] = [row.replace(",", ',"', 1) for row in rows[1:]]


def empty_columns(rows, schema):
    rows[1:] = [",,,," for _ in rows[1:]]


def decimal_commas(rows, schema):
    rows[:] = [rows[0].replace(",", ";")] + [
        row.replace(",", ";").replace(";", ",5;", 1) for row in rows[1:]
    ]
    schema["file"] = {"separator": ";"}


def mixed_encodings(rows, schema):
    rows[1:] = [row.encode("latin-1").decode("utf-8", "surrogateescape") for row in rows[1:]]


FAULTS = [
    wrong_categories, wrong_target_classes, wrong_bounds, swapped_columns, swapped_numbers,
    wrong_separator, separator_of_the_rows_alone, missing_column, renamed_column, header_only,
    nothing, no_header, unclosed_quotes, empty_columns, decimal_commas,
]  # fmt: skip


def broken(work: Path, fault) -> tuple[Path, Path]:
    rows, schema = lines(), json.loads(json.dumps(SCHEMA))
    fault(rows, schema)
    text = "".join(row + "\n" for row in rows)
    (work / "bad.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    (work / "bad.toml").write_text(tomli_w.dumps(schema), encoding="utf-8")
    return work / "bad.csv", work / "bad.toml"


def assert_stopped(result: Result) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert SECRET not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    with Ledger("a.ledger") as ledger:
        assert ledger.epsilon(delta=1e-6) <= 0.05 * EPSILON * 1.001


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("verb", MOST_VERBS)
def test_a_wrong_table_is_stopped_by_one_sentence_for_little(work, verb, fault):
    assert_stopped(run_verb(verb, *broken(work, fault)))


@pytest.mark.parametrize("verb", MOST_VERBS)
def test_mixed_encodings_are_stopped(work, verb):
    rows = lines(12_000)
    half = "\n".join(rows[:4000]).encode() + b"\n" + "\n".join(rows[4000:]).encode("latin-1")
    (work / "bad.csv").write_bytes(half + b"\n")
    result = run_verb(verb, work / "bad.csv", work / "good.toml")
    assert_stopped(result)
    assert "'town'" in result.output


@pytest.mark.parametrize("fault", [wrong_separator, separator_of_the_rows_alone, missing_column,
                                   header_only, empty_columns, swapped_columns])  # fmt: skip
def test_a_wrong_source_of_a_transfer_is_stopped_by_its_name(work, fault):
    table, _ = broken(work, fault)
    text = (work / "good.toml").read_text(encoding="utf-8").replace('"sick"\n', '"age"\n', 1)
    (work / "good.toml").write_text(text, encoding="utf-8")
    result = call("transfer", "good.csv", table, "--schema", "good.toml", "--epsilon", EPSILON,
                  "--ledger", "a.ledger", "--out", "run", "--no-page")  # fmt: skip
    assert_stopped(result)
    assert "bad.csv" in result.output


def other_categories(rows, schema):
    rows[1:] = [row.replace("ö", "oe").replace("Bonn", "BONN") for row in rows[1:]]


def months(rows, schema):
    rows[1:] = [f"{12 * int(row.split(',')[0])},{row.partition(',')[2]}" for row in rows[1:]]


def spaced_thousands(rows, schema):
    rows[1:] = [row.replace(",", " 000,", 1) for row in rows[1:]]


TABLE_FAULTS = [
    other_categories, months, spaced_thousands, swapped_columns, wrong_separator,
    separator_of_the_rows_alone, missing_column, renamed_column, header_only, nothing, no_header,
    unclosed_quotes, empty_columns, mixed_encodings,
]  # fmt: skip


def test_a_prediction_for_a_wrong_table_is_stopped_by_one_sentence(work):
    assert run_verb("regress", work / "good.csv", work / "good.toml").exit_code == 0
    for fault in TABLE_FAULTS:
        table, _ = broken(work, fault)
        result = call("predict", "run", table, "--out", "found.csv")
        assert result.exit_code == 2, fault
        assert result.stderr.startswith("error: bad.csv") or "bad.csv" in result.stderr, fault
        assert result.stderr.count("\n") == 1, fault
        assert SECRET not in result.output, fault
        assert not (work / "found.csv").exists(), fault


def test_a_prediction_for_few_records_notes_what_the_schema_does_not_describe(work):
    assert run_verb("regress", work / "good.csv", work / "good.toml").exit_code == 0
    (work / "one.csv").write_text("age,town,visits\n50,Paris,\n", encoding="utf-8")
    result = call("predict", "run", "one.csv")
    assert result.exit_code == 0
    assert result.stderr.endswith("replaced by its rules: town, visits\n")
    assert result.stdout.startswith("sick,P(no),P(yes)\n")
    assert call("predict", "run", "public.csv").stderr == ""


def test_a_public_test_that_the_schema_does_not_describe_is_refused(work):
    table, _ = broken(work, other_categories)
    more = ("--public-test", table)
    result = run_verb("regress", work / "good.csv", work / "good.toml", *more)
    assert_stopped(result)
    assert "bad.csv, column 'town'" in result.output


@pytest.mark.parametrize("verb", MOST_VERBS)
def test_ledger_and_schema_must_count_the_same_unit(work, verb):
    Ledger(work / "persons.ledger", Budget(2 * EPSILON, 1e-5), unit="person").close()
    schema = json.loads(json.dumps(SCHEMA))
    schema["columns"]["note"] = "person"
    (work / "person.toml").write_text(tomli_w.dumps(schema), encoding="utf-8")
    more = ("--ledger", "persons.ledger")
    result = run_verb(verb, work / "good.csv", work / "good.toml", *more)
    assert_stopped(result)
    assert "has no column of type person" in result.output
    result = run_verb(verb, work / "good.csv", work / "person.toml", "--out", "other")
    assert result.exit_code == 2
    assert "--unit person" in result.output or "too few" in result.output
    for name in ("a.ledger", "persons.ledger"):
        with Ledger(name) as ledger:
            assert ledger.history() == []


def test_a_schema_without_features_is_refused_before_paying(work):
    bare = {"target": "sick", "columns": {"sick": ["no", "yes"]}}
    (work / "bare.toml").write_text(tomli_w.dumps(bare), encoding="utf-8")
    result = run_verb("regress", work / "good.csv", work / "bare.toml")
    assert_stopped(result)
    assert "no column but the target" in result.output
    with Ledger("a.ledger") as ledger:
        assert ledger.history() == []


def test_a_run_folder_takes_no_other_settings(work):
    assert run_verb("regress", work / "good.csv", work / "good.toml").exit_code == 0
    assert call("regress", "run", "--no-page").exit_code == 0
    assert "is a run folder" in call("regress", "run", "--epsilon", 3).output
    assert "of method regression" in call("summarize", "run").output
    assert "of method regression" in call("train", "run").output


@pytest.mark.parametrize(
    ("verb", "target", "options", "message"),
    [
        ("regress", "sick", ["--delta", "0"], "delta must be in"),
        ("regress", "age", ["--delta", "0", "--method", "gradient"], "delta must be in"),
        ("regress", "age", ["--method", "descent"], "needs a target with categories"),
        ("regress", "sick", ["--method", "sgd"], "'sgd' is gone: write 'gradient'"),
        ("regress", "town", ["--method", "objective"], "binary"),
        ("transfer", "sick", ["--delta", "0"], "delta must be above 0"),
    ],
)
def test_a_fit_that_cannot_be_made_costs_nothing(work, verb, target, options, message):
    text = (work / "good.toml").read_text(encoding="utf-8")
    text = text.replace('target = "sick"', f'target = "{target}"')
    (work / "other.toml").write_text(text, encoding="utf-8")
    result = run_verb(verb, work / "good.csv", work / "other.toml", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    with Ledger("a.ledger") as ledger:
        assert ledger.history() == []


def test_a_public_sample_makes_the_check_free(work):
    table, schema = broken(work, wrong_categories)
    for verb in ("regress", "pate"):
        more = ("--public-sample", "public.csv", "--out", verb)
        result = run_verb(verb, table, schema, *more)
        assert_stopped(result)
        assert "column 'town'" in result.output
        with Ledger("a.ledger") as ledger:
            assert ledger.history() == []


@pytest.mark.parametrize("verb", ["regress", pytest.param("train", marks=pytest.mark.slow)])
def test_what_is_released_of_a_private_table_is_paid_or_declared_public(work, verb):
    result = run_verb(verb, work / "good.csv", work / "good.toml", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["epsilon"] <= EPSILON
    low, high = found["intervals"]["accuracy"]
    assert low <= found["accuracy"] <= high
    low, high = found["intervals"]["commonest class"]  # paid for with the scores
    assert low <= found["majority_accuracy"] <= high
    facts = json.loads((work / "run" / "facts.json").read_text())
    assert not any("test" in fact for fact in facts["assumed_public"])
    costs = {touch["what"]: touch["cost"] for touch in facts["touches"]}
    assert costs["evaluation"] == costs["check"] == "paid"
    for line in (work / "run").glob("metrics.jsonl"):
        assert "accuracy" not in line.read_text()
    with Ledger("a.ledger") as ledger:
        assert len(ledger.history()) == 4


@pytest.mark.parametrize("verb", ["regress", pytest.param("train", marks=pytest.mark.slow)])
def test_a_public_test_is_exact_and_no_evaluation_measures_nothing(work, verb):
    result = run_verb(verb, work / "good.csv", work / "good.toml", "--json", "--public-test",
                      "public.csv")  # fmt: skip
    found = json.loads(result.stdout)
    assert found["accuracy"] * 300 == pytest.approx(round(found["accuracy"] * 300))
    assert found["intervals"] == {}
    result = run_verb(verb, work / "good.csv", work / "good.toml", "--json", "--no-evaluation",
                      "--out", "other", "--page")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["accuracy"] is None
    assert "not measured" in (work / "other" / "report.html").read_text()


def test_every_number_on_the_page_is_the_one_in_the_facts(work):
    assert run_verb("regress", work / "good.csv", work / "good.toml", "--page").exit_code == 0
    facts = json.loads((work / "run" / "facts.json").read_text())
    certificate = json.loads((work / "run" / "certificate.json").read_text())
    page = (work / "run" / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    utility = facts["utility"]
    assert certificate["claim"]["epsilon"] == facts["epsilon"]
    assert certificate["utility"]["private"] == [utility["private"][0]["value"]]
    assert certificate["utility"]["intervals"] == utility["intervals"]
    numbers = [utility["private"][0]["value"], *utility["intervals"]["accuracy"]]
    shown = [f"{facts['epsilon']:.3f}", *(f"{100 * number:.2f} %" for number in numbers)]
    shown.append(f"{100 * utility['majority']:.2f} %")
    is_hidden = utility["intervals"]["auc"] == [0.0, 1.0]  # by noise, which is said in words
    assert ("auc" in utility["others"]) == (not is_hidden)
    shown += ["not measured"] if is_hidden else []
    for text in (*shown, f"{facts['n_records']:,} records", f"{utility['n_test']:,} held-out"):
        assert text in page, text


def test_a_finished_run_predicts_and_a_wrong_table_is_refused(work):
    assert run_verb("regress", work / "good.csv", work / "good.toml").exit_code == 0
    result = call("predict", "run", "public.csv", "--out", "found.csv")
    assert result.exit_code == 0, result.output
    found = (work / "found.csv").read_text().splitlines()
    assert found[0] == "sick,P(no),P(yes)"
    truth = [line.split(",")[3] for line in lines(300, 1)[1:]]
    right = [line.split(",")[0] == y for line, y in zip(found[1:], truth, strict=True)]
    assert np.mean(right) > 0.8
    for fault in (wrong_separator, missing_column, renamed_column, header_only, nothing):
        table, _ = broken(work, fault)
        result = call("predict", "run", table)
        assert result.exit_code == 2, fault
        assert result.stderr.count("\n") == 1
        assert SECRET not in result.output
    for out in (".", "nowhere/found.csv"):
        assert call("predict", "run", "public.csv", "--out", out).exit_code == 2


def test_pate_asks_about_declared_public_inputs_only(work):
    result = call("pate", "good.csv", "--schema", "good.toml", "--out", "run")
    assert "--public-test" in result.output
    result = run_verb("pate", work / "good.csv", work / "good.toml", "--noise", 10)
    assert result.exit_code == 2, result.output
    assert "planned queries cost" in result.output
    Ledger(work / "b.ledger", Budget(9, 1e-5)).close()
    result = call("pate", "good.csv", "--schema", "good.toml", "--public-test", "public.csv",
                  "--teachers", 20, "--queries", 20, "--noise", 10, "--ledger", "b.ledger",
                  "--out", "pate", "--seed", 1)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert call("predict", "pate", "public.csv").output.startswith("sick\n")


@pytest.mark.parametrize("epsilon", [4, 8])
def test_pate_by_epsilon_answers_every_query_although_the_check_was_paid_first(work, epsilon):
    result = call("pate", "good.csv", "--schema", "good.toml", "--public-test", "public.csv",
                  "--teachers", 20, "--queries", 20, "--epsilon", epsilon, "--out", "pate",
                  "--no-page", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout[result.stdout.index("{") :])
    assert facts["utility"]["others"]["answered"] == 20
    assert 0.9 * epsilon < facts["epsilon"] <= epsilon
    entries = list(Ledger(work / "pate" / "run.ledger", read_only=True).history())
    assert len(entries) == 2  # the check, and all votes as one plan


def test_the_schema_of_a_file_begins_with_its_names(work):
    assert call("schema", "init", "good.csv", "--out", "new.toml").exit_code == 0
    text = (work / "new.toml").read_text()
    assert 'age = ""' in text
    assert "Köln" not in text
    result = call("schema", "check", "new.toml", "good.csv")
    assert result.exit_code == 2
    assert "line" in result.output
    assert "'age' is not declared yet" in result.output
    assert "exists already" in call("schema", "init", "good.csv", "--out", "new.toml").output
    assert call("schema", "check", "good.toml", "good.csv").exit_code == 0
    (work / "bare.csv").write_text("39,Bonn\n40,Köln\n", encoding="utf-8")
    assert "--no-header" in call("schema", "init", "bare.csv").output
    assert call("schema", "init", "bare.csv", "--no-header").exit_code == 0
    assert 'c2 = ""' in (work / "bare.toml").read_text()


def test_parquet_declares_booleans(work):
    import pandas as pd

    pd.DataFrame({"a": [True], "b c": [1.5]}).to_parquet(work / "t.parquet")
    assert call("schema", "init", "t.parquet").exit_code == 0
    text = (work / "t.toml").read_text()
    assert 'a = "boolean"' in text
    assert '"b c" = ""  # double in the file' in text


def test_advice_and_recipes_need_no_values(work):
    result = call("advise", "good.csv", "--schema", "good.toml", "--epsilon", 1, "--json")
    found = json.loads(result.stdout)
    assert found["records"] == 4000
    assert found["features"] == 5
    assert "drown" in call("advise", "--records", 50, "--columns", 99, "--epsilon", 0.1).output
    assert all(name in call("recipes").output for name in shipped())
    assert Recipe.parse(call("recipes", "mnist").output) == Recipe.read("mnist")


def test_records_batch_and_epochs_stand_for_rate_and_steps():
    noise = ("--noise-multiplier", 4, "--delta", 1e-5, "--json")
    one = call("epsilon", "--rate", 0.01, "--steps", 1000, *noise)
    two = call("epsilon", "--records", 60000, "--batch-size", 600, "--epochs", 10, *noise)
    assert json.loads(one.stdout) == json.loads(two.stdout)
    budget = ("--epsilon", 1, "--delta", 1e-5, "--json")
    one = call("calibrate", "--rate", 0.01, "--steps", 1000, *budget)
    two = call("calibrate", "--records", "6e4", "--batch-size", 600, "--epochs", 10, *budget)
    assert json.loads(one.stdout) == json.loads(two.stdout)
    assert (
        call("epsilon", "--records", 10, "--batch-size", 20, "--epochs", 1, *noise).exit_code == 2
    )
    assert call("epsilon", *noise).exit_code == 2


def fuzzed(value, rng: random.Random, depth: int = 0):
    """`value` with some parts replaced by values of other kinds."""
    odd = ["", SECRET, -1, 0, 1e400, 10**400, float("nan"), True, [], {}, [1, "x"], {"a": [[]]},
           [3, 1], ["x", "x"], "number", "person", "x" * 500, "\x1b[31m"]  # fmt: skip
    if rng.random() < 0.08:
        return rng.choice(odd)
    if isinstance(value, dict):
        found = {k: fuzzed(v, rng, depth + 1) for k, v in value.items() if rng.random() > 0.04}
        if rng.random() < 0.1:
            found[rng.choice(["tpye", "lower", "target", "colums", ""])] = rng.choice(odd)
        return found
    if isinstance(value, list | tuple):
        return [fuzzed(v, rng, depth + 1) for v in value]
    return value


def test_500_fuzzed_schemas_and_recipes_give_no_traceback_and_quote_nothing(work):
    rng, n_read = random.Random(5), 0
    recipes = [Recipe.read(name).to_dict() for name in shipped()]
    recipes.append({"method": "regression", "data": {"name": "table", "path": "good.csv",
                                                     "schema": SCHEMA}})  # fmt: skip
    recipes.append(Recipe(method="pate").to_dict())
    rich = {**SCHEMA, "file": {"separator": ",", "missing": ["-9"]},
            "derived": [{"name": "old", "column": "age", "at_least": 65}]}  # fmt: skip
    visits = {"type": "number", "lower": 0, "upper": 40, "missing": 0, "outside": "clip"}
    rich["columns"] = {**SCHEMA["columns"], "visits": visits}
    for k in range(500):
        is_schema = k % 2 == 0
        given = fuzzed(rich if is_schema else rng.choice(recipes), rng)
        message = ""
        try:
            if is_schema:
                Schema.from_dict(given if isinstance(given, dict) else {}).to_dict()
            else:
                Recipe.from_dict(given if isinstance(given, dict) else {}).to_dict()
            n_read += 1
        except (ValueError, TacitError) as stopped:
            message = str(stopped)
        assert "\n" not in message
        assert len(message) < 700
    assert 25 < n_read < 450


def test_damaged_texts_of_schemas_give_one_line(work):
    rng = random.Random(6)
    text = tomli_w.dumps(SCHEMA)
    for _ in range(40):
        cut = rng.randrange(len(text))
        damaged = text[:cut] + rng.choice(["", "=", "[", "\x00", '"', "é", "\n"]) + text[cut + 3 :]
        (work / "bad.toml").write_text(damaged, encoding="utf-8")
        result = call("schema", "check", "bad.toml", "good.csv")
        assert result.exit_code in (0, 2), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        if result.exit_code == 2:
            assert result.stderr.count("\n") == 1


@pytest.mark.filterwarnings("ignore:the noise on the votes:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_damaged_tables_quote_no_value(work, verb):
    rng = random.Random(7)
    text = "\n".join(lines(200)).encode()
    number = (work / "good.toml").read_text(encoding="utf-8").replace('"sick"\n', '"age"\n', 1)
    (work / "number.toml").write_text(number, encoding="utf-8")
    for k in range(40):
        cut = rng.randrange(len(text))
        junk = rng.choice([b"", b'"', b"\x00", b"\xff\xfe", b"\n\n", b",,,", SECRET.encode()])
        (work / "bad.csv").write_bytes(text[:cut] + junk + text[cut + rng.randrange(9) :])
        more = {"pate": ("--public-test", "public.csv", "--teachers", 5, "--queries", 5),
                "transfer": ("public.csv",)}.get(verb, ())  # fmt: skip
        schema = "number.toml" if verb == "transfer" else "good.toml"
        result = call(verb, "bad.csv", *more, "--schema", schema, "--epsilon", 5,
                      "--out", f"run{k}", "--no-page")  # fmt: skip
        assert result.exit_code in (0, 2), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert SECRET not in result.output


@pytest.mark.parametrize("verb", MOST_VERBS)
def test_a_verb_that_ignores_weights_says_so(work, verb):
    schema = json.loads(json.dumps(SCHEMA))
    schema["columns"]["visits"] = {"type": "weight", "lower": 0, "upper": 40}
    (work / "weights.toml").write_text(tomli_w.dumps(schema), encoding="utf-8")
    result = run_verb(verb, work / "good.csv", work / "weights.toml")
    assert result.exit_code == 0, result.output
    assert "weights are not used" in result.stderr
    assert "weights are not used" in call("schema", "check", "weights.toml").stderr


@pytest.mark.parametrize("n", [1, 2, 29])
def test_few_records_are_refused_by_their_number_not_by_which_are_held_out(work, n):
    (work / "few.csv").write_text("\n".join(lines(n)) + "\n", encoding="utf-8")
    result = run_verb("regress", work / "few.csv", work / "good.toml")
    assert_stopped(result)
    assert f"few.csv has {n} records, too few" in result.output


def test_a_typo_in_the_section_of_the_file_names_its_line(work):
    text = (work / "good.toml").read_text(encoding="utf-8") + '\n[file]\nseperator = ";"\n'
    (work / "typo.toml").write_text(text, encoding="utf-8")
    result = call("schema", "check", "typo.toml")
    line = text.splitlines().index('seperator = ";"') + 1
    assert f"line {line}: [file] has no 'seperator'. Did you mean 'separator'?" in result.output
