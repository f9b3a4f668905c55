"""Studies of private regression: many fits of one table, and how their errors depend on a setting.

    study_functional     loss against epsilon by the functional mechanism, for several splits
    study_frank_wolfe    loss against epsilon, over l1 balls of several radii or another polytope
    study_migration      error against the number of other data sets that help (transfer)

Every fit is private, but errors are measured on held-out records without noise. So a figure may be
published only if the records are public: `Study.is_public`. `Study.epsilon_of_all` is the price of
releasing all of the fitted models. A ledger, if given, pays for every fit before it is made.
"""

import csv
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict, Unpack

import numpy as np

from tacit import datasets  # tables load with scikit-learn, when they are first used
from tacit._arrays import Floats
from tacit.events import Event, Relation
from tacit.experiments import data as data_of
from tacit.experiments.recipe import DataSettings
from tacit.experiments.sweeps import price_of_all
from tacit.ledger import Ledger

OnFit = Callable[[int, int], None]
"""Called after each fit, with the number of fits done and their total."""
_TEST_SHARE = 0.2
_LEAST = 10
"""Fewest records of a table that can be studied."""


@dataclass(frozen=True, kw_only=True)
class ErrorCurve:
    """Errors at each x, one for each repeat."""

    name: str
    x: tuple[float, ...]
    errors: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Study:
    """The result of a study: curves of errors, those of models without privacy, and the price."""

    name: str
    title: str
    data: str
    x_label: str
    y_label: str
    curves: tuple[ErrorCurve, ...]
    without_privacy: dict[str, float]
    """Mean errors of models without privacy, by name."""
    delta: float
    """Delta at which the price is stated."""
    epsilon_of_all: float
    """Epsilon of releasing every fitted model, by the Rényi accountant."""
    n_fits: int
    n_records: int
    is_public: bool
    """Whether the records are declared public, so that the errors may be shown to others."""
    is_paid: bool
    """Whether a ledger paid for the fits."""

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return plain JSON values."""
        return asdict(self)


class Table(NamedTuple):
    """Encoded rows of a table, in the units of its schema. Private unless declared public."""

    name: str
    x: Floats
    y: Floats
    bounds: Any  # Any: as `Schema.bounds` states them
    n_classes: int | None
    is_public: bool


class StudyTerms(TypedDict, total=False):
    """Options that all studies share, as keyword arguments."""

    repeats: int
    """Number of fits at each point; each has its own noise and its own held-out records."""
    seed: int | None
    """None draws noise and held-out records from fresh entropy."""
    ledger: Ledger | None
    on_fit: OnFit


def read_study_table(settings: DataSettings, root: str | Path | None = None) -> Table:
    """Return all rows of a table; raise if the schema does not describe them."""
    whole = replace(settings, evaluation="none", public_test="")
    found = data_of.load(whole, root, needs_classes=False)
    if settings.holds_public_records:  # then a part was held out all the same
        found = replace(
            found,
            x_train=np.concatenate([found.x_train, found.x_test]),
            y_train=np.concatenate([found.y_train, found.y_test]),
        )
    if len(found.x_train) < _LEAST:
        raise ValueError(f"{found.name} must have at least {_LEAST} records to be studied.")
    bounds = data_of.schema_of(settings).bounds
    x, y = np.asarray(found.x_train, np.float64), np.asarray(found.y_train)
    return Table(found.name, x, y, bounds, found.n_classes, settings.holds_public_records)


def read_data_sets(
    settings: DataSettings,
    sources: Sequence[str | Path] = (),
    *,
    by: str | None = None,
    root: str | Path | None = None,
) -> list[Table]:
    """Return the target and the other data sets: of several files, or of one divided by a column.

    With `by`, the records with the commonest value of this column are the target, and those with
    each other value are a source, large ones first. The column must be declared by the schema; the
    model does not use it.
    """
    if by is None:
        files = [settings, *(replace(settings, path=str(source)) for source in sources)]
        return [read_study_table(one, root) for one in files]
    if sources:
        raise ValueError("give SOURCES or --by COLUMN, not both.")
    columns = dict(settings.schema.get("columns", {}))
    if by not in columns or by == settings.schema.get("target"):
        raise ValueError(f"--by {by!r} must be a column of the schema that is not the target.")
    path = data_of.locate(settings.path, root)
    groups = np.asarray(datasets.read_columns(path, data_of.schema_of(settings))[by]).astype(str)
    del columns[by]
    rest = replace(settings, schema={**settings.schema, "columns": columns})
    rows = datasets.read_rows(path, data_of.schema_of(rest))
    groups = groups[rows.has_target]
    rows = datasets.with_target(rows)
    assert rows.y is not None  # the schema has a target
    names, counts = np.unique(groups, return_counts=True)
    order = names[np.argsort(-counts, kind="stable")]
    schema = data_of.schema_of(rest)
    x = np.asarray(rows.x, np.float64)
    return [
        Table(name, x[groups == name], rows.y[groups == name], schema.bounds, schema.n_classes,
              settings.holds_public_records)
        for name in order if np.sum(groups == name) >= _LEAST
    ]  # fmt: skip


def line_data_sets(
    n_sets: int, *, n_records: int = 1000, seed: int | None = None
) -> tuple[list[Table], "Points"]:
    """Return simulated data sets around the points i = 1, 2, ... of the line y = 2 i + 1.

    Both features equal i, up to a uniform number in [-1/2, 1/2]; the targets have errors of
    standard deviation 1/2. One data set alone says nothing about the slope. The second result is
    the points themselves, with errors in the units of y.
    """
    rng, middle = np.random.default_rng(seed), (n_sets + 1) / 2
    half = 2 * middle  # of the targets' bounds, which are 1 +- that around the middle

    def scaled(t: Floats, y: Floats) -> tuple[Floats, Floats]:
        return np.column_stack([t, t]) / middle - 1, (y - 1) / half - 1

    found = []
    for i in range(1, n_sets + 1):
        t = i + rng.uniform(-0.5, 0.5, n_records)
        x, y = scaled(t, 2 * t + 1 + rng.normal(0, 0.5, n_records))
        found.append(Table(f"around {i}", x, y, (-1, 1), None, True))
    whole = np.arange(1.0, n_sets + 1)
    return found, Points(*scaled(whole, 2 * whole + 1), scale=1 / half**2)


def study_functional(
    table: Table,
    *,
    epsilons: Sequence[float],
    splits: Sequence[float | None] = (None,),
    delta: float = 1e-6,
    **terms: Unpack[StudyTerms],
) -> Study:
    """Return the loss of the functional mechanism at each epsilon, a curve for each split.

    A split is the share of epsilon for the quadratic coefficients; None is the default share. The
    fits are pure differential privacy; their common price is stated at `delta`.
    """
    from tacit.regression import LinearRegression

    if table.n_classes is not None:
        raise ValueError("the functional mechanism needs a number as target.")

    def make(split: float | None, epsilon: float, options: dict[str, Any]) -> Any:
        return LinearRegression(
            method="functional", delta=0.0, epsilon=epsilon, split=split,
            target_bounds=(-1, 1), **options,
        )  # fmt: skip

    names = {f"split {'by default' if split is None else f'{split:g}'}": split for split in splits}
    return _by_epsilon(
        table, "functional", "Functional mechanism: loss against epsilon", make, names, epsilons,
        delta, **terms,
    )  # fmt: skip


def study_frank_wolfe(
    table: Table,
    *,
    epsilons: Sequence[float],
    radii: Sequence[float | None] = (None,),
    vertices: Floats | None = None,
    steps: int | None = None,
    delta: float = 1e-6,
    **terms: Unpack[StudyTerms],
) -> Study:
    """Return the loss of private Frank–Wolfe at each epsilon, a curve for each polytope.

    The polytopes are l1 balls of the given radii (None is the default radius), or the convex hull
    of the `vertices`, one row each in the encoded units of the table.
    """
    from tacit.regression import ConstantModel, FrankWolfe

    if table.n_classes not in (None, 2):
        raise ValueError("Frank-Wolfe needs a number or two classes as target.")
    is_number = table.n_classes is None
    kind: dict[str, Any] = {"loss": "squared" if is_number else "logistic", "steps": steps}
    kind |= {"target_bounds": (-1, 1)} if is_number else {"classes": (0, 1)}

    def make(radius: float | None, epsilon: float, options: dict[str, Any]) -> Any:
        polytope = {"radius": radius} if vertices is None else {"vertices": vertices}
        return FrankWolfe(epsilon=epsilon, delta=delta, **kind, **polytope, **options)

    names = {f"radius {'by default' if r is None else f'{r:g}'}": r for r in radii}
    if vertices is not None:
        names = {f"polytope of {len(vertices)} vertices": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantModel)  # `_by_epsilon` counts them
        return _by_epsilon(
            table, "frank-wolfe", "Frank–Wolfe over a polytope: loss against epsilon", make, names,
            epsilons, delta, **terms,
        )  # fmt: skip


def study_migration(
    tables: Sequence[Table],
    *,
    counts: Sequence[int] | None = None,
    epsilon: float = 1.0,
    delta: float = 1e-6,
    h: float | None = None,
    q: int = 2,
    penalty: float | None = None,
    points: "Points | None" = None,
    **terms: Unpack[StudyTerms],
) -> Study:
    """Return the error on the first table against the number of other tables that help to fit it.

    `counts` are these numbers; default all. The error is the mean squared error on held-out records
    of the target, relative to their variance, or that at the `points` if they are given.
    """
    from tacit.regression import TransferRegression

    target, *sources = tables
    if target.n_classes is not None:
        raise ValueError("transfer needs a number as target: declare lower and upper for it.")
    used = list(range(len(sources) + 1)) if counts is None else sorted(set(counts))
    if not used or not 0 <= used[0] <= used[-1] <= len(sources):
        raise ValueError(f"the numbers of data sets must be from 0 to {len(sources)}.")
    draws = _Draws(**terms)
    events: list[Event] = []
    found = []  # (counts, repeats, 2)
    for count in used:
        found.append([])
        for repeat in range(draws.repeats):
            train, test = draws.split(len(target.x), repeat)
            model = TransferRegression(
                epsilon=epsilon, delta=delta, h=h, q=q, penalty=penalty,
                target_bounds=(-1, 1), **draws.options(target, repeat),
            )  # fmt: skip
            others = [(source.x, source.y) for source in sources[:count]]
            model.fit(target.x[train], target.y[train], sources=others)
            events.append(model.event_)
            measured = Points.of(target, test) if points is None else points
            coef, intercept = model.alone_
            own = measured.x @ coef + intercept
            found[-1].append([measured.error(own), measured.error(model.predict(measured.x))])
            draws.tell(len(events), len(used) * draws.repeats)
    alone, helped = np.moveaxis(np.array(found), 2, 0).tolist()
    return Study(
        name="migration",
        title="Transfer: error against the number of migrated data sets",
        data=target.name,
        x_label="migrated data sets",
        y_label="squared error / variance" if points is None else "sum of squared errors",
        curves=(
            _curve("target alone", used, alone),
            _curve("with the other data sets", used, helped),
        ),
        without_privacy={},
        **draws.price(events, delta),
        n_records=sum(len(t.x) for t in tables),
        is_public=all(t.is_public for t in tables),
    )


class Points(NamedTuple):
    """Rows and targets to measure at; the squared error there is divided by `scale`."""

    x: Floats
    y: Floats
    scale: float = 1.0

    @classmethod
    def of(cls, table: Table, rows: np.ndarray) -> Self:
        """Return held-out rows of a table, whose error is relative to their variance."""
        y = table.y[rows]
        return cls(table.x[rows], y, float(np.var(y)) * len(y))

    def error(self, predicted: Floats) -> float:
        """Return the sum of squared errors over `scale`."""
        return float(np.sum((predicted - self.y) ** 2)) / self.scale


def read_vertices(path: str | Path) -> Floats:
    """Return the vertices of a polytope from a CSV file without a header, one vertex per line."""
    with Path(path).open(encoding="utf-8", newline="") as stream:
        try:
            rows = [[float(cell) for cell in row] for row in csv.reader(stream) if row]
        except ValueError:
            raise ValueError(f"{Path(path).name} must hold numbers only, without names.") from None
    if not rows or len({len(row) for row in rows}) != 1:
        raise ValueError(f"{Path(path).name} must hold one vertex per line, all of one length.")
    return np.array(rows)


class _Draws:
    """Held-out records and noise of each repeat, and what the fits have in common."""

    def __init__(
        self,
        *,
        repeats: int = 5,
        seed: int | None = None,
        ledger: Ledger | None = None,
        on_fit: OnFit = lambda _done, _total: None,
    ) -> None:
        if repeats < 1:
            raise ValueError(f"repeats must be >= 1, got {repeats}.")
        self.repeats, self.seed, self.ledger, self.tell = repeats, seed, ledger, on_fit
        self._fresh = np.random.default_rng().integers(2**62)

    def split(self, n: int, repeat: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the training records and of the held-out records."""
        start = self._fresh if self.seed is None else self.seed
        order = np.random.default_rng([int(start), repeat]).permutation(n)
        held = max(1, round(_TEST_SHARE * n))
        return order[held:], order[:held]

    def options(self, table: Table, repeat: int) -> dict[str, Any]:
        """Return settings of an estimator: bounds, ledger, relation and seed of the noise."""
        found: dict[str, Any] = {"bounds": table.bounds, "ledger": self.ledger}
        if self.ledger is not None:
            found["relation"] = str(self.ledger.relation)
        return found | {"random_state": None if self.seed is None else self.seed + repeat}

    def price(self, events: Sequence[Event], delta: float) -> dict[str, Any]:
        """Return the fields of `Study` that state the price of all fits together."""
        relation = Relation.ADD_REMOVE if self.ledger is None else self.ledger.relation
        price = price_of_all(events, delta=delta, relation=relation, is_tight=False)
        found = {"delta": delta, "epsilon_of_all": price, "n_fits": len(events)}
        return found | {"is_paid": self.ledger is not None}


def _by_epsilon(
    table: Table,
    name: str,
    title: str,
    make: Callable[[Any, float, dict[str, Any]], Any],  # Any: a setting, an estimator's options
    settings: dict[str, Any],
    epsilons: Sequence[float],
    delta: float,
    **terms: Unpack[StudyTerms],
) -> Study:
    """Return a study with a curve for each setting: loss on held-out records against epsilon.

    A warning says how many of the fits at each point gave a constant model.
    """
    draws, at = _Draws(**terms), sorted(set(epsilons))
    if not at:
        raise ValueError("a study needs at least one epsilon.")
    events: list[Event] = []
    curves, total = [], len(settings) * len(at) * draws.repeats
    for label, setting in settings.items():
        rows = []
        for epsilon in at:
            rows.append([])
            n_constant = 0
            for repeat in range(draws.repeats):
                train, test = draws.split(len(table.x), repeat)
                model = make(setting, epsilon, draws.options(table, repeat))
                model.fit(table.x[train], table.y[train])
                events.append(model.event_)
                rows[-1].append(_loss(table, model, test))
                draws.tell(len(events), total)
                n_constant += getattr(model, "is_constant_", False)
            if n_constant:
                warnings.warn(
                    f"{label}, epsilon {epsilon:g}: {n_constant} of {draws.repeats} models are "
                    "constant, they predict the same for every row within the bounds.",
                    stacklevel=3,
                )
        curves.append(_curve(label, at, rows))
    return Study(
        name=name,
        title=title,
        data=table.name,
        x_label="epsilon",
        y_label="squared error / variance" if table.n_classes is None else "logistic loss",
        curves=tuple(curves),
        without_privacy=_without_privacy(table, draws),
        **draws.price(events, delta),
        n_records=len(table.x),
        is_public=table.is_public,
    )


def _loss(table: Table, model: Any, rows: np.ndarray) -> float:
    """Return the squared error relative to the variance, or the mean logistic loss, on `rows`."""
    x, y = table.x[rows], table.y[rows]
    if table.n_classes is None:
        return float(np.mean((model.predict(x) - y) ** 2) / np.var(y))
    scores = np.asarray(model.decision_function(x)).reshape(-1)
    return float(np.mean(np.logaddexp(0.0, scores) - y * scores))


def _without_privacy(table: Table, draws: _Draws) -> dict[str, float]:
    """Return the mean loss over repeats of an ordinary fit on the same records."""
    from sklearn.linear_model import LinearRegression, LogisticRegression

    losses = []
    for repeat in range(draws.repeats):
        train, test = draws.split(len(table.x), repeat)
        model = LinearRegression() if table.n_classes is None else LogisticRegression(max_iter=1000)
        losses.append(_loss(table, model.fit(table.x[train], table.y[train]), test))
    kind = "least squares" if table.n_classes is None else "logistic regression"
    return {f"{kind} without privacy": float(np.mean(losses))}


def _curve(name: str, x: Iterable[float], rows: Iterable[Sequence[float]]) -> ErrorCurve:
    return ErrorCurve(name=name, x=tuple(map(float, x)), errors=tuple(tuple(row) for row in rows))
