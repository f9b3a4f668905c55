"""The check of a private table by its schema, before anything else is paid for.

A wrong category list or swapped columns give a useless model for the whole price. So a small, paid,
noisy count of the values that the schema does not describe comes first, and a hopeless run stops
there. With a declared public sample the check is exact and free.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tacit import summaries
from tacit.datasets import Dataset
from tacit.events import Event, PureDP, from_dict
from tacit.experiments import data as data_of
from tacit.experiments.facts import CHECK, Touch
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import DataSettings, Recipe
from tacit.ledger import Ledger, paid_once

_FALSE_ALARM = 1e-3


class _Flagged(NamedTuple):
    """One private table of a run: which of its records the schema does not describe, by column."""

    file: str
    flags: Mapping[str, np.ndarray]


def check_table(
    recipe: Recipe,
    flags: Mapping[str, np.ndarray],
    run: RunFolder,
    ledger: Ledger,
    *,
    epsilon: float,
    root: str | Path | None = None,
    others: Mapping[str, Mapping[str, np.ndarray]] | None = None,
    disjoint: bool = True,
) -> tuple[Event, ...]:
    """Check the table once in a run, and return the events that were paid for it, if any.

    `flags` says which records have a value that the schema does not describe, by column; it is
    empty for other data. `epsilon` is that of the whole run, of which the check spends
    `data.check_share`. The result is stored in the run folder, so a resumed run does not pay again.
    Raises `HopelessTable` if more values of a column than `data.most_outside` are not described by
    the schema; the probability of stopping a table that the schema describes that well is below
    0.1 %.

    `others` are the flags of further private tables by the names of their files. If they are
    `disjoint`, each person is in one table, so that one payment covers the checks of all of them
    (parallel composition). Otherwise each table is paid for.
    """
    settings = recipe.data
    most = settings.records_per_person  # above 1 for a public table too, which has no flags
    unit = data_of.schema_of(settings).unit if flags or most > 1 else "record"
    _refuse_other_unit(unit, ledger, records_per_person=most)
    if not flags:
        return ()
    if settings.public_sample:
        data_of.read_public(settings.public_sample, settings, root)
        return ()
    if not settings.check_share:
        return ()
    if not (run / CHECK).is_file():
        tables = [_Flagged("", flags), *(_Flagged(*one) for one in (others or {}).items())]
        content = [np.ascontiguousarray(f).tobytes() for t in tables for f in t.flags.values()]
        with paid_once(ledger, b"check", recipe.to_toml().encode(), *content) as seed:
            stored = _count(recipe, tables, ledger, epsilon, seed, disjoint=disjoint)
            whole = stored[0] | {"others": stored[1:], "entries": sorted(ledger.used)}
            run.write(CHECK, json.dumps(whole, indent=2) + "\n")
    first = json.loads((run / CHECK).read_text(encoding="utf-8"))
    ledger.used.update(first.get("entries", ()))  # a resumed run also paid for its check
    found = [first, *first.get("others", ())]
    if hopeless := [one["message"] for one in found if one["is_hopeless"]]:
        raise data_of.HopelessTable(hopeless[0])
    return tuple(from_dict(one["event"]) for one in (found[:1] if disjoint else found))


def check_plan(recipe: Recipe, flags: Mapping[str, np.ndarray]) -> tuple[PureDP, ...]:
    """Return what `check_table` may cost at most: one event, or none if nothing is paid."""
    settings = recipe.data
    if not flags or settings.public_sample or not settings.check_share:
        return ()
    return (PureDP(settings.check_share * recipe.privacy.budget.epsilon),)


def _refuse_other_unit(unit: str, ledger: Ledger, *, records_per_person: int) -> None:
    """Raise if the ledger counts another unit of privacy than the schema, "record" or "person".

    A ledger may name persons by another word. Neither unit stands for the other: a person may have
    several records; and if one record of each person is kept, then without the first of them the
    next one takes its place, which changes more than one record added or removed.
    """
    if unit == "person" and ledger.unit == "record":
        raise ValueError(
            "the schema has a column of type person, but the ledger counts records. Create a "
            "ledger with --unit person (in a recipe: privacy.unit)."
        )
    if unit == "person" and records_per_person == 1:
        ledger.declare_one_record_each()  # the first record of each person was kept
    if unit == "record" and ledger.unit != "record":
        raise ValueError(
            f"the ledger counts the privacy of one {ledger.unit}, but the data has no column of "
            "type person. Declare the column that names the person, or create a ledger with "
            "--unit record."
        )


def _count(
    recipe: Recipe,
    tables: Sequence[_Flagged],
    ledger: Ledger,
    epsilon: float,
    seed: int,
    *,
    disjoint: bool,
) -> list[dict[str, Any]]:  # Any: JSON values
    """Pay for the counts of all tables, release them, and return them as stored in the folder."""
    settings, found = recipe.data, []
    most = settings.records_per_person
    persons: dict[str, Any] = {} if most == 1 else {"records_per_person": most}
    for k, table in enumerate(tables):
        count = summaries.count_outside(
            table.flags,
            tolerated=settings.most_outside,
            false_alarm=_FALSE_ALARM,
            epsilon=settings.check_share * epsilon,
            # The first payment covers the records of all tables if each person is in one of them.
            ledger=ledger if k == 0 or not disjoint else None,
            relation=ledger.relation,
            rng=rng_of(recipe, 1, k, fresh=seed),
            **persons,
        )
        found.append(_stored(count, settings, table.file, epsilon))
    return found


def spend_check(settings: DataSettings, ledger: Ledger, *, epsilon: float) -> None:
    """Let `ledger` pay what `check_table` will pay for a table, without reading the table.

    The price does not depend on the records, so two columns without a flag stand for them.
    """
    summaries.count_outside(
        dict.fromkeys(("feature", "target"), summaries.FlagCounts(0, 1)),
        epsilon=settings.check_share * epsilon,
        ledger=ledger,
        relation=ledger.relation,
    )


def table_touches(
    settings: DataSettings, dataset: Dataset, checked: Sequence[Event], paid: Event | None
) -> tuple[Touch, ...]:
    """Return the uses that a run makes of a private table besides learning; none for other data."""
    if not dataset.flags:
        return ()
    found = check_touches(settings, checked)
    if paid is not None:
        how = f"noisy scores on {dataset.n_held_out:,} {dataset.counted}s that were held out"
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


def rng_of(recipe: Recipe, *use: int, fresh: int | None = None) -> np.random.Generator | None:
    """Return the source of noise for `use`, some numbers that differ between uses in a run.

    It is seeded by the recipe's seed, or else by `fresh`; None, for the system's entropy, if
    neither is given.
    """
    seed = fresh if recipe.run.seed is None else recipe.run.seed
    return None if seed is None else np.random.default_rng([seed, *use])


def _paid(what: str, how: str, event: Event) -> Touch:
    return Touch(what=what, how=how, cost="paid", event=event.to_dict())


def _stored(
    found: "summaries.OutsideCount", settings: DataSettings, file: str, epsilon: float
) -> dict[str, Any]:  # Any: JSON values
    share = min(1.0, max(0.0, found.share.value))
    spent = (
        f"The check spent {settings.check_share * epsilon:.3g} of this run's epsilon of "
        f"{epsilon:.3g}; nothing else was spent. Correct the schema, then choose another --out."
    )
    where = f"{file}, " if file else ""
    return {
        "column": found.column,
        "share": found.share.to_dict(),
        "most_outside": settings.most_outside,
        "is_hopeless": found.is_hopeless,
        "message": f"{where}{data_of.undescribed(found.column, share)} {spent}",
        "event": found.event.to_dict(),
    }
