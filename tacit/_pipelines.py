"""Steps in front of a private estimator: they must leave every record a record of its own.

A step that learns from the records (a scaler, an imputer) releases what it learned without noise.
A step that treats records together, such as `FunctionTransformer(scale)`, lets one record change
all others, which no bound of the estimator covers. So a step is accepted only if it is known to
learn nothing but the shape of a table and to transform each record by itself: the classes of
scikit-learn that do, `tacit.datasets.Schema`, and compositions of them.
"""

import pickle
from typing import Any

import numpy as np

from tacit.errors import LearningStep

_KNOWN = ("sklearn", "tacit")  # packages whose transformers were read


def refuse_step(name: str, step: Any) -> None:  # Any: a transformer of any library
    """Raise `LearningStep` unless the fitted `step` is known to treat each record by itself."""
    _refuse_mixing(name, step)
    _refuse_learning(name, step)


def _refuse_mixing(name: str, step: Any) -> None:
    """Raise if `step`, or a step inside of it, may transform several records together."""
    from sklearn.decomposition import NMF, MiniBatchNMF
    from sklearn.preprocessing import FunctionTransformer

    if step is None or isinstance(step, str):
        return
    # NMF ends its iterations when all rows together have converged.
    is_mixing = isinstance(step, NMF | MiniBatchNMF) or (
        isinstance(step, FunctionTransformer) and step.func is not None
    )
    if is_mixing or type(step).__module__.partition(".")[0] not in _KNOWN:
        raise LearningStep(
            f"the step {name!r} ({type(step).__name__}) is not known to treat each record by "
            "itself, so that one record could change others. Transform the records one by one "
            "before, or declare the columns with tacit.datasets.Schema."
        )
    if getattr(step, "memory", None) is not None:
        raise LearningStep(
            f"the step {name!r} has a memory, which would keep private records. Leave it out."
        )
    if any(_chooses_by_records(columns) for _, _, columns in getattr(step, "transformers", [])):
        raise LearningStep(
            f"the step {name!r} ({type(step).__name__}) chooses columns by a function of the "
            "records. Name the columns."
        )
    for inner, part in _inside(step):
        _refuse_mixing(inner, part)


def _refuse_learning(name: str, step: Any) -> None:
    """Raise if `step`, or a step inside of it, learns more from a table than its shape."""
    from sklearn.frozen import FrozenEstimator
    from sklearn.utils import get_tags

    if step is None or isinstance(step, str | FrozenEstimator):
        return
    if inside := _inside(step):
        for inner, part in inside:
            _refuse_learning(inner, part)
        return
    if get_tags(step).requires_fit and not _learns_shape_only(step):
        raise LearningStep(
            f"the step {name!r} ({type(step).__name__}) learns from the private records without "
            "paying. Declare what it would learn: tacit.datasets.Schema({'age': [18, 93]}) scales "
            "and fills missing values by declared bounds. A step that was fitted on public data "
            "may stay as sklearn.frozen.FrozenEstimator(step)."
        )


def _inside(step: Any) -> list[tuple[str, Any]]:
    """Return the names and the steps that a composition consists of."""
    from sklearn.frozen import FrozenEstimator

    if isinstance(step, FrozenEstimator):
        return [("frozen", step.estimator)]
    parts = [
        *getattr(step, "steps", []),
        *getattr(step, "transformer_list", []),
        *getattr(step, "transformers_", getattr(step, "transformers", [])),
    ]
    if hasattr(step, "transformers") and not hasattr(step, "transformers_"):
        parts.append(("remainder", step.remainder))
    return [(str(part[0]), part[1]) for part in parts]


def _chooses_by_records(columns: object) -> bool:
    """Return whether columns are chosen by a function of the table other than its schema."""
    from sklearn.compose import make_column_selector

    return callable(columns) and type(columns) is not make_column_selector


def _learns_shape_only(step: Any) -> bool:
    """Return whether copies of `step`, fitted to different tables, end up equal.

    The tables have the number of columns of the fitted step: random numbers, numbers with other
    means and scales, constants, and, where the step accepts them, missing values. Columns of text
    are not tried: a step that cannot be fitted to numbers counts as one that learns.
    """
    from sklearn.base import clone

    width = getattr(step, "n_features_in_", None)
    if width is None:
        return False
    rng = np.random.default_rng(0)
    shape, labels = (64, width), np.arange(64) % 2
    tables = [rng.normal(0, 1, shape), rng.normal(5, 3, shape), np.ones(shape)]
    gaps = np.where(rng.random(shape) < 0.5, np.nan, 1.0)
    gaps[:, 0] = np.nan
    found = set()
    for table in (*tables, gaps):
        copy: Any = clone(step)
        try:
            found.add(pickle.dumps(_learned(copy.fit(table, labels))))
        except Exception:  # whatever the step raises, it could not be shown to learn nothing
            if table is not gaps:
                return False
    return len(found) == 1


def _learned(step: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(step).items() if name.endswith("_")}
