"""Recipes for tables in which a person has several records."""

import numpy as np
import pytest

from tacit.datasets import Schema, held_out, read_rows, read_table
from tacit.events import Repeated, from_dict
from tacit.experiments import Recipe, audit_run, replay_run, train
from tacit.report import verify_run, write_page

COLUMNS = {"who": "person", "x": [-5, 5], "y": ["no", "yes"]}
SCHEMA = {"target": "y", "columns": COLUMNS}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    who, x = rng.integers(0, 120, 500), rng.normal(size=500)
    lines = [f"p{w},{v:.3f},{'yes' if v > 0 else 'no'}" for w, v in zip(who, x, strict=True)]
    path = tmp_path_factory.mktemp("persons") / "visits.csv"
    path.write_text("\n".join(["who,x,y", ",0.5,yes", *lines]) + "\n")
    return path


def recipe(table, **data):
    return Recipe.from_dict({
        "data": {"name": "table", "path": str(table), "schema": SCHEMA, **data},
        "privacy": {"epsilon": 3.0, "unit": "person"},
        "training": {"epochs": 1.0},
        "run": {"stretches": 1, "baseline_steps": 0},
    })  # fmt: skip


def test_at_most_k_records_of_each_person_are_read(table):
    rows = read_rows(table, Schema.from_dict(SCHEMA), records_per_person=3)
    counts = np.unique(rows.persons, return_counts=True)[1]
    assert counts.max() == 3
    assert None not in rows.persons


def test_all_records_of_a_person_are_held_out_or_none(table):
    schema = Schema.from_dict(SCHEMA)
    rows = read_rows(table, schema, records_per_person=3)
    test = held_out(rows, 0.4)
    persons = np.array(rows.persons)
    assert not set(persons[test]) & set(persons[~test])
    dataset = read_table(table, schema, test_share=0.4, records_per_person=3)
    assert dataset.persons.ids == tuple(persons[~test])
    assert dataset.n_records == len(set(persons)) - round(0.4 * len(set(persons)))


@pytest.mark.parametrize("sampled", ["persons", pytest.param("records", marks=pytest.mark.slow)])
def test_a_run_protects_persons(table, tmp_path, sampled):
    facts = train(recipe(table, records_per_person=3, sampled=sampled), tmp_path)
    assert facts.unit == "person"
    assert facts.epsilon <= 3.0
    assert facts.records_per_person == 3
    assert f"of {sampled}" in facts.sampling_used
    (steps,) = (e for e in from_dict(facts.event).parts[0].parts if isinstance(e, Repeated))
    is_mixed = type(steps.event).__name__ == "GaussianMixture"
    assert is_mixed == (sampled == "records")
    read = read_table(table, Schema.from_dict(SCHEMA), records_per_person=3, sampled=sampled)
    assert facts.n_records == read.n_records
    write_page(tmp_path)
    assert verify_run(tmp_path) == []
    assert all(part.is_same for part in replay_run(tmp_path))


def test_a_public_table_has_persons_too(table, tmp_path):
    facts = train(recipe(table, records_per_person=3, is_public=True, sampled="persons"), tmp_path)
    assert facts.unit == "person"
    named = recipe(table, records_per_person=3).with_settings({"privacy.unit": "record"})
    with pytest.raises(ValueError, match="counts records"):
        train(named, tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("sampled", ["persons", "records"])
def test_an_audit_of_persons_finds_no_fault(table, tmp_path, sampled):
    train(recipe(table, records_per_person=3, sampled=sampled), tmp_path)
    found = audit_run(tmp_path, n_canaries=100, seed=0)
    assert found["passes"] if isinstance(found, dict) else found.passes


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"records_per_person": 3, "validation_share": 0.2, "is_public": True}, "must be 1"),
        ({"records_per_person": 3, "schema": {**SCHEMA, "columns": {**COLUMNS, "who": "ignored"}}},
         "person"),
        ({"records_per_person": 0}, "records_per_person"),
        ({"records_per_person": 3, "sampled": "users"}, "persons, records"),
    ],
)  # fmt: skip
def test_what_does_not_protect_persons_is_refused(table, tmp_path, changed, what):
    with pytest.raises(ValueError, match=what):
        train(recipe(table, **changed), tmp_path)


def test_features_that_are_paid_for_are_refused(table, tmp_path):
    asked = recipe(table, records_per_person=3).with_settings({"features.kind": "pca"})
    with pytest.raises(ValueError, match="paid for"):
        train(asked, tmp_path)


def test_correlated_noise_for_records_of_persons_is_refused_before_the_table_is_checked(
    table, tmp_path
):
    asked = recipe(table, records_per_person=3, sampled="records")
    with pytest.raises(ValueError, match=r"training.bands must be 1 with data.sampled records"):
        train(asked.with_settings({"training.bands": 4}), tmp_path)
    assert not list(tmp_path.rglob("*ledger*"))
    filled = asked.with_settings({"training.bands": "auto"}).filled(120)
    assert filled.training.bands == 1
