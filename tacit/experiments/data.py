"""The data of a recipe: a named data set or a table, with the split that measures the model."""

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from scipy.stats import binom

from tacit import datasets, sources
from tacit.errors import TacitError
from tacit.experiments.recipe import DataSettings

_PACKAGE = "package:"
_LEAST_DIVIDED = 30
"""Fewest records of a private table that is divided. Which records are held out depends on their
values, so with fewer records an empty part would be likely, and its error would reveal them."""


class HopelessTable(TacitError):
    """The schema does not describe a table, so the run was stopped before its main payment."""


def load(
    settings: DataSettings,
    root: str | Path | None = None,
    *,
    needs_classes: bool = True,
    needs_rows: bool = True,
    takes_persons: bool = False,
) -> datasets.Dataset:
    """Load the training records (private) and the records that measure the model.

    `root` is the folder that holds the data, default `TACIT_DATA`. The test records of a published
    data set, of a table declared public, and of the file `public_test` are public. Those held out
    of a private table are private: `Dataset.is_test_public` is False. If the settings name a
    validation share, that fraction of the training records is held out and used in place of the
    test split. Without `needs_rows`, the data may be a table in a database, whose rows stay there.
    `takes_persons` says that the caller protects persons with several records.
    """
    if needs_rows:
        sources.require_rows(settings.path)
    is_divided = settings.name != "table" or settings.validation_share
    takes_persons = takes_persons or sources.is_database(settings.path)
    if settings.records_per_person > 1 and (is_divided or not takes_persons):
        raise ValueError(
            "data.records_per_person must be 1 here: only tacit train of a table without "
            "data.validation_share, and tacit regress and tacit summarize of a database, protect "
            "persons with several records. With 1, one record of each person is used."
        )
    if settings.name == "table":
        dataset = _table(settings, root)
    else:
        dataset = datasets.load(settings.name, data=settings.path or root)
    if needs_classes and dataset.n_classes is None:
        raise ValueError(
            f"the target of {dataset.name} must have categories: recipes train classifiers. "
            "For a number, use: tacit regress"
        )
    return _validating(dataset, settings) if settings.validation_share else dataset


def _table(settings: DataSettings, root: str | Path | None) -> datasets.Dataset:
    """Return the records of a table, with those of `public_test` as test records, if declared."""
    if sources.is_database(settings.path):
        return _table_in_engine(settings, root)
    schema, path = schema_of(settings), locate(settings.path, root)
    if not schema.feature_names:
        raise ValueError("the schema declares no column but the target: there is nothing to fit.")
    has_test = settings.public_test or settings.evaluation == "none"
    found = datasets.read_table(
        path,
        schema,
        test_share=0.0 if has_test else settings.test_share,
        seed=settings.split_seed,
        records_per_person=settings.records_per_person,
        sampled=settings.sampled,
    )
    if settings.public_test:
        public = read_public(settings.public_test, settings, root)
        assert public.y is not None  # read_table refuses a schema without a target
        found = replace(found, x_test=public.x, y_test=public.y, n_held_out=len(public.x))
    n = found.n_records + (0 if has_test else found.n_held_out)
    ids = () if found.persons is None else found.persons.ids
    is_by_person = bool(ids) and found.counted == "person"
    if not has_test and not settings.holds_public_records and n < _LEAST_DIVIDED:
        raise ValueError(
            f"{path.name} has {n} {found.counted}s, too few to hold out a part of them: use "
            "--no-evaluation or --public-test FILE."
        )
    if settings.holds_public_records:
        return replace(
            found,
            n_records=len(set(ids)) if is_by_person else len(found.x_train),
            n_held_out=len(found.x_test),
            is_test_public=True,
            flags={},
        )
    return replace(found, is_test_public=bool(settings.public_test))


def _table_in_engine(settings: DataSettings, root: str | Path | None) -> datasets.Dataset:
    """Return a table in a database without its rows: its public facts and private counts."""
    schema, place = schema_of(settings), settings.path
    if settings.evaluation != "none" and not settings.public_test:
        raise ValueError(
            "a table in a database is not divided: use --no-evaluation or --public-test FILE."
        )
    most = sources.require_bound(schema, settings.records_per_person)
    with sources.open_table(place, schema) as table:
        flags = sources.flag_counts(table.coded(schema, most), schema)
    n_records = next(iter(flags.values())).n_records
    if n_records == 0:
        raise ValueError(f"{sources.name_of(place)} has no records.")
    x = np.zeros((0, len(schema.feature_names)), np.float32)
    found = datasets.Dataset(
        name=sources.name_of(place),
        x_train=x,
        y_train=np.zeros(0),
        x_test=x,
        y_test=np.zeros(0),
        n_classes=schema.n_classes,
        feature_names=schema.feature_names,
        public=(
            f"number of {schema.unit if most == 1 else 'record'}s",
            "bounds and categories of the schema",
        ),
        n_records=n_records,
        n_held_out=0,
        is_test_public=bool(settings.public_test),
        flags=flags,  # type: ignore[arg-type]  # counts in place of flags
        unit=schema.unit,
        persons=None if most == 1 else datasets.PersonRows((), most, "records"),
    )
    if not settings.public_test:
        return found
    public = read_public(settings.public_test, settings, root)
    assert public.y is not None  # read with a schema that names a target
    return replace(found, x_test=public.x, y_test=public.y, n_held_out=len(public.x))


def count_records(settings: DataSettings, root: str | Path | None = None) -> int:
    """Return the number of training records of a table, which is assumed public."""
    n = datasets.count_rows(locate(settings.path, root), schema_of(settings).dialect)
    has_test = settings.public_test or settings.evaluation == "none"
    return max(1, n if has_test else n - round(settings.test_share * n))


def schema_of(settings: DataSettings) -> "datasets.Schema":
    """Return the schema of a table."""
    return datasets.Schema.from_dict(settings.schema)


def read_public(
    file: str, settings: DataSettings, root: str | Path | None
) -> "datasets.EncodedRows":
    """Return the rows of a public table that have a target; raise if the schema does not fit it."""
    path, schema = locate(file, root), schema_of(settings)
    rows = datasets.read_rows(path, schema)
    flags = dict(zip(schema.checked, rows.flags.T, strict=True))
    refuse_undescribed(path.name, flags, settings.most_outside)
    return datasets.with_target(rows)


def refuse_undescribed(
    file: str, flags: Mapping[str, np.ndarray], most: float, *, false_alarm: float = 1.0
) -> None:
    """Raise `HopelessTable` if the schema does not describe a column of a public table.

    That is so if more than the share `most` of its values are flagged, and if records that are
    flagged independently with that probability give as many with probability `false_alarm` at most.
    """
    for column, flagged in flags.items():
        count, n = int(np.sum(flagged)), len(flagged)
        if count > most * n and binom.sf(count - 1, n, most) <= false_alarm:
            raise HopelessTable(f"{file}, {undescribed(column, count / n)} Nothing was spent.")


def undescribed(column: str, share: float) -> str:
    """Return a sentence about a column of which a share is not described by the schema."""
    if column == datasets.FIELDS:
        return (
            f"about {share:.0%} of the lines do not have as many fields as the first line: check "
            "separator and quote in [file] of the schema."
        )
    return (
        f"column {column!r}: the schema does not describe about {share:.0%} of the values. Check "
        "its bounds or categories, its place in the file, the encoding, how numbers are written "
        "(decimal in [file]), and missing values (missing in [file] lists the texts that mean one)."
    )


def _validating(dataset: datasets.Dataset, settings: DataSettings) -> datasets.Dataset:
    """Hold out a part of the training records to measure the model, in place of the test split.

    The part is chosen by a fixed permutation of the row numbers, so it depends on no value.
    """
    n = len(dataset.x_train)
    order = np.random.default_rng(settings.split_seed).permutation(n)
    held = max(1, round(settings.validation_share * n))
    measured, trained = np.sort(order[:held]), np.sort(order[held:])
    return replace(
        dataset,
        x_train=dataset.x_train[trained],
        y_train=dataset.y_train[trained],
        x_test=dataset.x_train[measured],
        y_test=dataset.y_train[measured],
        n_records=len(trained),
        n_held_out=len(measured),
    )


def locate(path: str, root: str | Path | None) -> Path:
    """Return the path of the table's file, found in `root`, `TACIT_DATA` or the current folder.

    `package:NAME/FILE` stands for the file FILE inside the installed Python package NAME.
    """
    if path.startswith(_PACKAGE):
        name, _, file = path.removeprefix(_PACKAGE).partition("/")
        # The parent of a dotted name would be imported, and a recipe may not run code.
        found = find_spec(name) if name.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return Path(found.submodule_search_locations[0]) / file
    folders = [Path(root)] if root else []
    folders += [Path(os.environ["TACIT_DATA"])] if "TACIT_DATA" in os.environ else []
    for folder in (*folders, Path()):
        if (folder / path).is_file():
            return folder / path
    if Path(path).is_absolute():
        raise FileNotFoundError(f"there is no file {path}.")
    looked = ", ".join(str(folder) for folder in (*folders, Path()))
    raise FileNotFoundError(
        f"there is no {path} in {looked}. Name its folder with --data or TACIT_DATA."
    )
