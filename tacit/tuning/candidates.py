"""The candidates of a search: an estimator with each configuration, and what each would pay.

The search sets the budget of a run, its ledger and its seed, and declares public facts (number of
training records, classes). An estimator pays before it releases anything, so its event is found by
fitting it up to its payment.
"""

import contextlib
import copy
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._pipelines import refuse_step
from tacit.events import Event, Relation
from tacit.ledger import Ledger, PlannedPayment, PlanningLedger

Configuration = Mapping[str, Any]  # Any: values of settings
Space = Mapping[str, Sequence[Any]] | Sequence[Configuration]
_SET_BY_SEARCH = (
    *("epsilon", "delta", "ledger", "random_state", "rng", "n_records", "classes", "relation"),
    *("target_bounds", "folder", "cache", "reference"),
)


class PrivateRecords(NamedTuple):
    """Private records of one part: inputs and targets, row by row."""

    x: Any
    y: Any

    @classmethod
    def of(cls, x: Any, y: ArrayLike) -> "PrivateRecords":
        """Return the records; raise unless each has one target. A column counts as a row."""
        from sklearn.exceptions import DataConversionWarning

        targets = np.asarray(y)
        if targets.ndim == 2 and targets.shape[1] == 1:  # a table
            warnings.warn(
                "y is a column, where one number for each record is expected: it is read as such.",
                DataConversionWarning,
                stacklevel=3,
            )
            targets = targets[:, 0]
        if targets.ndim != 1:
            raise ValueError(f"y must have one value for each record, got shape {targets.shape}.")
        table = x if hasattr(x, "shape") else np.asarray(x)
        if table.shape[:1] != targets.shape:
            raise ValueError(
                f"X and y must have as many rows, got {table.shape[:1]} and {targets.shape}."
            )
        return cls(table, targets)

    def rows(self, chosen: Any) -> "PrivateRecords":
        """Return the records with these indices, or at which this mask is true."""
        index = np.flatnonzero(chosen) if np.asarray(chosen).dtype == bool else chosen
        x = self.x.iloc[index] if hasattr(self.x, "iloc") else self.x[index]
        return PrivateRecords(x, self.y[index])

    def copied(self) -> "PrivateRecords":
        """Return the records as objects that may be changed, or that refuse to be changed."""
        return PrivateRecords(*(_copied(part) for part in self))


@dataclass(frozen=True)
class Candidates:
    """The configurations of one private estimator, with the public facts of their training.

    Parameters
    ----------
    estimator
        Unfitted, with a setting `ledger` of its own; or a pipeline that ends in such an estimator.
    n_records
        Declared number of training records.
    run_delta
        The delta that goes with the epsilon of a run.
    classes
        All labels, for estimators to which none were declared.
    public
        Public inputs that are passed to `fit` as third argument (PATE), or None.
    """

    estimator: Any  # Any: estimators share methods, not a type
    configurations: tuple[Configuration, ...]
    n_records: float
    delta: float
    run_delta: float
    relation: Relation
    classes: NDArray[Any]
    public: Any = None

    @classmethod
    def of(
        cls,
        estimator: Any,
        space: Space,
        *,
        labels: Any,
        n_training: float,
        delta: float,
        relation: Relation | None,
        public: Any,
    ) -> "Candidates":
        """Return the candidates; raise if the estimator or the space cannot be searched."""
        from sklearn.base import clone

        names = _names(estimator)
        if public is not None and not hasattr(estimator, "plan_event"):
            raise TypeError(f"{type(estimator).__name__} takes no public inputs: leave them out.")
        base: Any = clone(estimator, safe=False)
        given = base.get_params().get(names.get("relation", ""))
        own = None if given is None else Relation(given)
        made = cls(
            base,
            configurations_of(space, names),
            n_training,
            delta,
            run_delta=delta,
            relation=relation or own or Relation.ADD_REMOVE,
            classes=np.unique(labels),  # assumed public, as by the estimators
            public=public,
        )
        for index in range(len(made.configurations)):
            made.model(index, epsilon=None, ledger=None, seed=None)
        return made

    @property
    def has_budget(self) -> bool:
        """Whether the noise of a run follows from an epsilon."""
        return "epsilon" in _names(self.estimator) and not _has_given_noise(self.estimator)

    @property
    def is_automatic(self) -> bool:
        """Whether the estimator, as it was given, chooses all settings of the space itself."""
        given = self.estimator.get_params()
        settings = {name for configuration in self.configurations for name in configuration}
        values = [given.get(name) for name in settings]
        return all(isinstance(value, str) and value == "auto" for value in values)

    @property
    def target_bounds(self) -> Any:
        """The bounds that the estimator declares for its target, or None."""
        return self.estimator.get_params().get(_names(self.estimator).get("target_bounds", ""))

    def on(self, n_records: float, delta: float) -> "Candidates":
        """Return the same candidates with other public facts of their training.

        `n_records` is the declared number of records, `delta` that of the epsilon of a run. An
        estimator with a delta of 0 asks for pure DP and keeps it.
        """
        return replace(self, n_records=n_records, run_delta=delta)

    def model(
        self,
        index: int,
        *,
        epsilon: float | None,
        ledger: Ledger | None,
        seed: int | None,
        reference: tuple[float, float] | None = None,
        cache: Path | None = None,
    ) -> Any:
        """Return an unfitted copy of the estimator with configuration `index`.

        Values of the configuration are copied too, so that no run has an object of another one.
        `reference` is the (epsilon, delta) of the run for which a trial chooses, and `cache` a
        private folder for what runs compute.
        """
        from sklearn.base import clone

        model: Any = clone(self.estimator, safe=False)
        chosen = self.configurations[index]
        model.set_params(**{name: clone(value, safe=False) for name, value in chosen.items()})
        names = _names(model)
        given = {plain: model.get_params()[name] for plain, name in names.items()}
        self._require_searchable(given)
        values = {
            "ledger": ledger,
            "random_state": seed,
            "rng": seed,
            "reference": reference,
            "cache": cache,
            "n_records": max(1, round(self.n_records)),
        }
        if epsilon is not None:
            values["epsilon"] = epsilon
        if given.get("delta") != 0 and not _has_given_noise(model):
            values["delta"] = self.run_delta
        if given.get("classes") is None and "target_bounds" not in names:
            values["classes"] = self.classes
        named = {names[key]: value for key, value in values.items() if key in names}
        return model.set_params(**named)

    def event(self, index: int, *, epsilon: float, records: PrivateRecords) -> Event:
        """Return the event that training with configuration `index` would pay for.

        Nothing is released. An estimator that needs public inputs says its event itself, by
        `plan_event(number of public inputs)`. Errors in settings are raised here.
        """
        ledger = PlanningLedger(relation=self.relation)
        model = self.model(
            index, epsilon=epsilon if self.has_budget else None, ledger=ledger, seed=0
        )
        if self.public is not None:
            return model.plan_event(len(self.public))
        try:
            with silence():
                model.fit(records.x, records.y)
        except PlannedPayment as planned:
            for name, step in _steps_before(model):  # fitted by now, as far as they learn at all
                refuse_step(name, step)
            return planned.event
        raise TypeError(
            f"{type(model).__name__} must pay from its ledger before it releases anything, and "
            "paid nothing."
        )

    def require_public_plan(self, *, epsilon: float, records: PrivateRecords) -> None:
        """Raise `ValueError` if what a run pays changes when some of the records are left out."""
        if self.public is not None:
            return
        fewer = records.rows(np.arange(0, len(records.y) - len(records.y) // 4))
        for index in range(len(self.configurations)):
            events = {self.event(index, epsilon=epsilon, records=r) for r in (records, fewer)}
            if len(events) > 1:
                raise ValueError(
                    f"the event of {type(self.estimator).__name__} depends on the records, which "
                    "are private. It must follow from declared settings, such as n_records."
                )

    def forget_run(self, model: Any) -> None:
        """Remove what belongs to a run from its model: the seed would reveal the noise."""
        names, forgotten = _names(model), ("ledger", "random_state", "rng", "cache")
        model.set_params(**{names[key]: None for key in forgotten if key in names})
        for part in parts_of(model):
            if getattr(part, "ledger_", None) is not None:
                part.ledger_ = None

    def _require_searchable(self, given: Mapping[str, Any]) -> None:
        """Raise if an estimator would keep files, or has another relation than the search."""
        for name in ("folder", "cache"):
            if given.get(name) is not None:
                raise ValueError(
                    f"estimator must not have a {name}: it would keep what the search must delete."
                )
        own = given.get("relation")
        if own is not None and Relation(own) is not self.relation:
            raise ValueError(
                f"relation of the estimator must be that of the ledger, {self.relation}, got "
                f"{Relation(own)}."
            )


def configurations_of(space: Space, names: Mapping[str, str]) -> tuple[Configuration, ...]:
    """Return all configurations of a grid {setting: [values]}, or those of a list.

    >>> configurations_of({"l2": [0.1, 0.2], "method": ["gradient"]}, {})
    ({'l2': 0.1, 'method': 'gradient'}, {'l2': 0.2, 'method': 'gradient'})
    """
    if isinstance(space, Mapping):
        if any(
            isinstance(v, str) or not isinstance(v, Sequence | np.ndarray) for v in space.values()
        ):
            raise ValueError("space must give a list of values for each setting.")
        found = tuple(dict(zip(space, values, strict=True)) for values in product(*space.values()))
    else:
        found = tuple(dict(one) for one in space)
    if not found:
        raise ValueError("space must have at least one configuration.")
    taken = sorted({name for one in found for name in one if name in names.values()})
    if taken:
        raise ValueError(f"space must not contain {', '.join(taken)}: the search sets them.")
    return found


def parts_of(model: Any) -> list[Any]:
    """Return a model and, if it is a pipeline, its steps and theirs, without those left out."""
    steps = [step for _, step in getattr(model, "steps", []) if hasattr(step, "fit")]
    return [model, *(part for step in steps for part in parts_of(step))]


def _copied(part: Any) -> Any:
    is_fixed = isinstance(part, np.ndarray) and not part.flags.writeable
    return part if is_fixed else copy.deepcopy(part)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard what is printed, logged or warned of in the block: it may show private values.

    Output belongs to the whole process. So blocks of several threads share one silence, from the
    first that begins to the last that ends.
    """
    global _n_silent
    with _silence_lock:
        if _n_silent == 0:
            _undo.enter_context(_discarded())
        _n_silent += 1
    try:
        yield
    finally:
        with _silence_lock:
            _n_silent -= 1
            if _n_silent == 0:
                _undo.close()


_n_silent = 0  # blocks that are silent now
_silence_lock = threading.Lock()
_undo = contextlib.ExitStack()


@contextlib.contextmanager
def _discarded() -> Iterator[None]:
    """Discard output of the process, from the beginning to the end of the block."""
    before = logging.root.manager.disable
    logging.disable(sys.maxsize)
    try:
        with (
            warnings.catch_warnings(),
            _discarded_descriptors(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _discarded_descriptors() -> Iterator[None]:
    """Discard what libraries and child processes write to standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()  # lines from before the block
    kept: dict[int, int] = {}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            with contextlib.suppress(OSError):  # a process may have closed its outputs
                kept[number] = os.dup(number)
                os.dup2(nowhere, number)
        yield
    finally:
        for number, copied in kept.items():
            os.dup2(copied, number)
            os.close(copied)
        os.close(nowhere)


def _names(estimator: Any) -> dict[str, str]:
    """Return what the search sets by plain name, with the name that the estimator has for it.

    Raises unless the estimator pays itself, from a setting `ledger`, or is a pipeline that ends in
    one that does. Any other composition has parts that would learn from the records unpaid.
    """
    from sklearn.pipeline import Pipeline

    prefix, part = "", estimator
    while type(part) is Pipeline:
        if part.memory is not None:
            raise ValueError(
                "the pipeline must not have a memory: it would keep what the search must delete."
            )
        name, part = part.steps[-1]
        prefix += f"{name}__"
    known = part.get_params(deep=True) if hasattr(part, "get_params") else {}
    if [name for name in known if name.split("__")[-1] == "ledger"] != ["ledger"]:
        raise TypeError(
            "estimator must be private: one that pays from a setting 'ledger' of its own, or a "
            f"Pipeline that ends in one, got {type(part).__name__}, whose parts could learn from "
            "the records without paying."
        )
    return {plain: prefix + plain for plain in _SET_BY_SEARCH if plain in known}


def _steps_before(model: Any) -> list[tuple[str, Any]]:
    """Return the names and the steps in front of the private estimator in a pipeline."""
    found: list[tuple[str, Any]] = []
    while steps := getattr(model, "steps", None):
        found += steps[:-1]
        model = steps[-1][1]
    return found


def _has_given_noise(estimator: Any) -> bool:
    """Return whether an estimator was given its noise itself, as PATE by an aggregator of votes."""
    return getattr(estimator, "aggregator", None) is not None
