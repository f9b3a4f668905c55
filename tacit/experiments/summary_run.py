"""Private statistics of a table by recipe: counts, means, quantiles and shares in one run folder.

The check of the table takes `data.check_share` of epsilon, and the description the rest. A run that
was killed after a payment repeats the description with the same noise, as long as table and recipe
are the same, so it does not pay again (`tacit.ledger.paid_once`).
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tacit import (
    datasets,
    sources,
    summaries,
)  # tables load with scikit-learn, when they are first used
from tacit.events import Event, Relation, Sequence
from tacit.experiments import data as data_of
from tacit.experiments.facts import SUMMARY, Facts, Touch, Utility, claim_fields, file_hash
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import DataSettings, Recipe
from tacit.experiments.table_check import check_releases, check_table, check_touches, rng_of
from tacit.ledger import Ledger, paid_once

if TYPE_CHECKING:
    from tacit.datasets import Schema

METHOD = "summary"


def run_summary(
    recipe: Recipe,
    folder: str | Path,
    *,
    root: str | Path | None = None,
    ledger: str | Path | None = None,
) -> Facts:
    """Describe the recipe's table into `folder`, and return the facts; a finished run is kept.

    `root` is the folder of the data. `ledger` is the ledger file that pays (default: the recipe's,
    or one in the folder). `summary.json` holds the statistics, as `StatisticTable.to_dict` does.
    """
    run = RunFolder(folder)
    with run.taken(recipe, verb="summarize", root=root) as place:
        if run.is_finished:
            return run.facts()
        schema = data_of.schema_of(recipe.data)
        if not any(column.is_feature for column in schema.declared):
            raise ValueError("the schema declares no column to summarize: all of them are ignored.")
        table = _table_of(recipe.data, schema, place)
        with run.paying(recipe, place, ledger) as paying:
            epsilon = recipe.privacy.budget.epsilon
            checked = check_table(recipe, table.flags, run, paying, epsilon=epsilon, root=place)
            with paid_once(paying, table.fingerprint, recipe.to_toml().encode()) as seed:
                found = _describe(recipe, schema, table.columns, paying, checked, seed).rounded()
                run.write(SUMMARY, found.to_json() + "\n")
                facts = _facts(recipe, schema, table.name, paying, checked, found)
                return run.finish(replace(facts, seconds=run.seconds), paying)


class _SummarizedTable(NamedTuple):
    """The private table of a run. Any: columns and flags, or counts of them."""

    name: str
    columns: Mapping[str, Any]
    flags: Mapping[str, Any]
    fingerprint: bytes
    """Of all values; random where they are not here, so that no earlier attempt is repeated."""


def _table_of(
    settings: DataSettings, schema: "Schema", root: str | Path | None
) -> _SummarizedTable:
    address, most = settings.path, sources.require_bound(schema, settings.records_per_person)
    if sources.is_database(address):
        with sources.open_table(address, schema) as opened:
            rows = opened.coded(schema, most)
            columns, flags = sources.tallies(rows, schema), sources.flag_counts(rows, schema)
        return _SummarizedTable(sources.name_of(address), columns, flags, os.urandom(32))
    if most > 1:
        raise ValueError(
            "data.records_per_person must be 1 for a file, of which one record of each person is "
            "used. For more, use the address duckdb:FILE.parquet."
        )
    path = data_of.locate(address, root)
    flags = dict(zip(schema.checked, datasets.read_rows(path, schema).flags.T, strict=True))
    columns = datasets.read_columns(path, schema)
    return _SummarizedTable(path.name.split(".")[0], columns, flags, file_hash(path).encode())


def _describe(
    recipe: Recipe,
    schema: "Schema",
    columns: Mapping[str, Any],
    ledger: Ledger,
    checked: tuple[Event, ...],
    seed: int,
) -> summaries.StatisticTable:
    """Return the statistics, with the price and the event of the check included."""
    asked, privacy, most = recipe.summary, recipe.privacy.budget, recipe.data.records_per_person
    # Several records of a person are not independent, as intervals about the population assume.
    about: dict[str, Any] = {"about": asked.about}
    if most > 1:
        about = {"about": "records", "records_per_person": most}
    found = summaries.describe(
        columns,
        schema,
        probabilities=asked.quantiles,
        check_share=0.0,
        flags={},  # checked before
        confidence=asked.confidence,
        epsilon=privacy.epsilon * (1 - (recipe.data.check_share if checked else 0.0)),
        delta=privacy.delta,
        relation=ledger.relation,
        ledger=ledger,
        rng=rng_of(recipe, 3, fresh=seed),
        **about,
    )
    event = Sequence((*checked, found.event)) if checked else found.event
    return replace(found, event=event, epsilon=privacy.epsilon)


def _facts(
    recipe: Recipe,
    schema: "Schema",
    name: str,
    ledger: Ledger,
    checked: tuple[Event, ...],
    found: summaries.StatisticTable,
) -> Facts:
    """Return the facts. The number of records in them is the released one, which has noise."""
    columns = [column.name for column in schema.declared if column.is_feature]
    rows, event = found.rows, found.event
    parts = event.parts[len(checked) :] if isinstance(event, Sequence) and checked else (event,)
    is_size_public = ledger.relation != Relation.ADD_REMOVE
    how = f"{len(rows)} noisy statistics of {len(columns)} columns: paid before their release"
    size = (f"number of {schema.unit}s",) if is_size_public else ()
    return Facts(
        **claim_fields(recipe, name, max(1, round(rows[0].value)), ledger, event),
        assumed_public=(*size, "bounds and categories of the schema"),
        sampling_assumed="none",
        sampling_used="none",
        touches=(
            *check_touches(recipe.data, checked),
            Touch(what="statistics", how=how, cost="paid", event=parts[0].to_dict()),
        ),
        released=("statistics with intervals", *check_releases(recipe.data)),
        method=METHOD,
        model=f"{len(rows)} statistics of {len(columns)} columns",
        hyperparameters={
            "quantiles": list(recipe.summary.quantiles),
            "about": recipe.summary.about if recipe.data.records_per_person == 1 else "records",
            "confidence": recipe.summary.confidence,
            "delta": recipe.privacy.delta,
        },
        utility=Utility(metric="none", private=()),
        model_file=SUMMARY,
        metrics_file="",
        records_per_person=recipe.data.records_per_person,
    )
