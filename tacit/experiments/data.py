"""The data of a recipe: a named data set or a table, with the split that measures the model."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from tacit import datasets
from tacit.experiments.recipe import DataSettings

_PACKAGE = "package:"


def load(settings: DataSettings, root: str | Path | None = None) -> datasets.Dataset:
    """Load the training records (private) and the records that measure the model (assumed public).

    `root` is the folder that holds the data, default `TACIT_DATA`. If the settings name a
    validation share, that fraction of the training records is held out and used in place of the
    test split.
    """
    if settings.name == "table":
        schema = datasets.Schema.from_dict(settings.schema)
        dataset = datasets.read_table(
            _find(settings.path, root),
            schema,
            test_share=settings.test_share,
            seed=settings.split_seed,
        )
    else:
        dataset = datasets.load(settings.name, data=settings.path or root)
    if dataset.n_classes is None:
        raise ValueError(
            f"the target of {dataset.name} must have categories: recipes train classifiers. "
            "For a number, see tacit.regression."
        )
    return _validating(dataset, settings) if settings.validation_share else dataset


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
    )


def _find(path: str, root: str | Path | None) -> Path:
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
    looked = ", ".join(str(folder) for folder in (*folders, Path()))
    raise FileNotFoundError(
        f"there is no {path} in {looked}. Name its folder with --data or TACIT_DATA."
    )
