"""The check of a private table by its schema, before anything else is paid for.

A wrong category list or swapped columns give a useless model for the whole price. So a small, paid,
noisy count of the values that the schema does not describe comes first, and a hopeless run stops
there. With a declared public sample the check is exact and free.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tacit import summaries
from tacit.datasets import FIELDS, Dataset
from tacit.errors import TacitError
from tacit.events import Event, from_dict
from tacit.experiments import data as data_of
from tacit.experiments.facts import CHECK, Touch
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import DataSettings, Recipe
from tacit.ledger import Ledger

_FALSE_ALARM = 1e-3


class HopelessTable(TacitError):
    """The schema does not describe the table, so the run was stopped before its main payment."""


def check_table(
    recipe: Recipe,
    flags: Mapping[str, np.ndarray],
    run: RunFolder,
    ledger: Ledger,
    *,
    epsilon: float,
    root: str | Path | None = None,
) -> tuple[Event, ...]:
    """Check the table once in a run, and return the event that was paid for it, if any.

    `flags` says which records have a value that the schema does not describe, by column; it is
    empty for other data. `epsilon` is that of the whole run, of which the check spends
    `data.check_share`. The result is stored in the run folder, so a resumed run does not pay again.
    Raises `HopelessTable` if more values of a column than `data.most_outside` are not described by
    the schema; the probability of stopping a table that the schema describes that well is below
    0.1 %.
    """
    settings = recipe.data
    if not flags:
        return ()
    if (sample := data_of.public_sample(settings, root)) is not None:
        names = data_of.schema_of(settings).checked
        check_public(dict(zip(names, sample.flags.T, strict=True)), settings.most_outside)
        return ()
    if not settings.check_share:
        return ()
    if not (run / CHECK).is_file():
        found = summaries.count_outside(
            flags,
            tolerated=settings.most_outside,
            false_alarm=_FALSE_ALARM,
            epsilon=settings.check_share * epsilon,
            ledger=ledger,
            relation=ledger.relation,
            rng=rng_of(recipe, 1),
        )
        run.write(CHECK, json.dumps(_stored(found, settings), indent=2) + "\n")
    stored = json.loads((run / CHECK).read_text(encoding="utf-8"))
    if stored["is_hopeless"]:
        raise HopelessTable(stored["message"])
    return (from_dict(stored["event"]),)


def check_public(flags: dict[str, np.ndarray], most: float) -> None:
    """Raise `HopelessTable` if a public sample has a column with too many values outside."""
    for column, flagged in flags.items():
        if np.mean(flagged) > most:
            raise HopelessTable(f"{_sentence(column, float(np.mean(flagged)))} Nothing was spent.")


def table_touches(
    settings: DataSettings, dataset: Dataset, checked: Sequence[Event], paid: Event | None
) -> tuple[Touch, ...]:
    """Return the uses that a run makes of a private table besides learning; none for other data."""
    if not dataset.flags:
        return ()
    found = check_touches(settings, checked)
    if paid is not None:
        how = f"noisy scores on {dataset.n_held_out:,} {dataset.unit}s that were held out"
        found.append(_paid("evaluation", how, paid))
    return tuple(found)


def check_touches(settings: DataSettings, checked: Sequence[Event]) -> list[Touch]:
    """Return the uses of a private table, or of its public sample, by the check."""
    found = [_paid("check", "noisy count of values outside the schema", e) for e in checked]
    if settings.public_sample:
        how = "of a sample that is declared public"
        found.append(Touch(what="check", how=how, cost="public"))
    return found


def check_releases(settings: DataSettings) -> tuple[str, ...]:
    """Return what the check of a private table releases."""
    if not settings.check_share or settings.public_sample:
        return ()
    return ("a noisy count of values outside the schema, and in which column",)


def table_releases(settings: DataSettings, dataset: Dataset) -> tuple[str, ...]:
    """Return what a run releases of a private table besides the model; none for other data."""
    if not dataset.flags:
        return ()
    is_paid = not dataset.is_test_public and settings.evaluation == "paid"
    return (*check_releases(settings), *(("noisy scores with intervals",) if is_paid else ()))


def rng_of(recipe: Recipe, use: int) -> np.random.Generator | None:
    """Return the source of noise number `use` of a run with a seed; None for fresh entropy."""
    seed = recipe.run.seed
    return None if seed is None else np.random.default_rng([seed, use])


def _paid(what: str, how: str, event: Event) -> Touch:
    return Touch(what=what, how=how, cost="paid", event=event.to_dict())


def _stored(found: "summaries.OutsideCount", settings: DataSettings) -> dict[str, Any]:
    share = min(1.0, max(0.0, found.share.value))
    spent = f"This check spent {100 * settings.check_share:g} % of the budget, and nothing else."
    return {
        "column": found.column,
        "share": found.share.to_dict(),
        "most_outside": settings.most_outside,
        "is_hopeless": found.is_hopeless,
        "message": f"{_sentence(found.column, share)} {spent}",
        "event": found.event.to_dict(),
    }


def _sentence(column: str, share: float) -> str:
    if column == FIELDS:
        return (
            f"about {share:.0%} of the lines do not have as many fields as the first line: check "
            "separator and quote in [file] of the schema."
        )
    return (
        f"column {column!r}: the schema does not describe about {share:.0%} of the values. Check "
        "its bounds or categories, its place in the file, the encoding, and its rule for missing "
        "values."
    )
