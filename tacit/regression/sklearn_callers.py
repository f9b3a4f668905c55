"""What scikit-learn does around a private fit, where it would spend or leak unseen.

A step of a `Pipeline` in front of a private estimator may learn from the records without paying
(`tacit._pipelines`). A search or a cross-validation without a ledger pays for many fits that nobody
adds up. An estimator is not told who calls it, so the callers are found on the stack of Python
frames; where none is found, nothing is claimed and nothing refused.
"""

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

from tacit._pipelines import refuse_step

_warned: WeakSet[Any] = WeakSet()  # objects that live as long as one cross-validation


class UncountedFits(UserWarning):
    """Warning: a search or cross-validation fits a private estimator several times, unpaid."""


def refuse_learning_steps() -> None:
    """Raise if a `Pipeline` that is being fitted has a step before the last that is not safe."""
    for frame in _frames():
        owner = frame.f_locals.get("self")
        steps = getattr(owner, "steps", None)
        if frame.f_code.co_name in ("fit", "fit_transform", "fit_predict") and isinstance(
            steps, list
        ):
            for name, step in steps[:-1]:
                refuse_step(name, step)


def warn_of_repeated_fits(epsilon: object, delta: object) -> None:
    """Warn with the total cost if a search or a cross-validation of scikit-learn is the caller.

    To be called when an estimator without a ledger is cloned.
    """
    for frame in _frames():
        module = frame.f_globals.get("__name__", "")
        if module == "sklearn.model_selection._search":
            _warn_of_search(frame, epsilon, delta)
            return
        if module == "sklearn.model_selection._validation" and "parallel" in frame.f_locals:
            _warn_of_validation(frame, epsilon, delta)
            return
        if not module.startswith(("sklearn.", "joblib.", "tacit.")):
            return  # the user's own call


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the callers, the nearest first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _warn_of_search(frame: FrameType, epsilon: object, delta: object) -> None:
    """Warn when a search clones its estimator for the first time, before its first fit."""
    search = frame.f_locals.get("self")
    if frame.f_code.co_name != "fit" or "base_estimator" in frame.f_locals:
        return  # a clone for one of its fits, or for the last one
    n_splits, candidates = getattr(search, "n_splits_", None), _candidates(search)
    if not n_splits or not candidates:
        _warn(type(search).__name__, None, epsilon, delta)
        return
    n_refits = int(bool(getattr(search, "refit", True)))
    totals = []
    for name, own in (("epsilon", epsilon), ("delta", delta)):
        # The candidate of the last fit is not known yet, so the costliest one stands for it.
        each = [_setting(candidate, name, own) for candidate in candidates]
        totals.append(n_splits * sum(each) + n_refits * max(each))
    n_fits = n_splits * len(candidates) + n_refits
    _warn(type(search).__name__, n_fits, epsilon, delta, totals)


def _candidates(search: Any) -> list[dict[str, Any]]:  # Any: searches of scikit-learn
    """Return the settings that a search will try; empty if they are not known in advance.

    A random search may draw any of its listed values, so the costliest stand for each draw.
    """
    from sklearn.model_selection import ParameterGrid

    if hasattr(search, "factor"):  # a halving search chooses its candidates by scores
        return []
    if hasattr(search, "param_grid"):
        listed = list(ParameterGrid(search.param_grid))
        return [] if any(_replaces_estimator(one) for one in listed) else listed
    spaces = getattr(search, "param_distributions", None)
    n_draws = getattr(search, "n_iter", None)
    if not isinstance(spaces, dict) or not n_draws or _replaces_estimator(spaces):
        return []
    if all(isinstance(values, list | tuple) for values in spaces.values()):
        listed = list(ParameterGrid(spaces))
        if n_draws >= len(listed):  # lists are drawn from without replacement
            return listed
    worst: dict[str, Any] = {}
    for name, values in spaces.items():
        if name.rpartition("__")[2] in ("epsilon", "delta"):
            if not isinstance(values, list | tuple):  # a distribution, which may have no end
                return []
            worst[name] = max(values)
    return [worst] * n_draws


def _replaces_estimator(settings: dict[str, Any]) -> bool:
    """Return whether a setting puts another estimator in the place of the private one."""
    values = (v if isinstance(v, list | tuple) else [v] for v in settings.values())
    return any(hasattr(one, "fit") for listed in values for one in listed)


def _setting(candidate: dict[str, Any], name: str, own: Any) -> Any:  # Any: values of settings
    """Return the value of `name` that a candidate gives to the estimator; by default its `own`."""
    given = [v for key, v in candidate.items() if key.rpartition("__")[2] == name]
    return max(given) if given else own


def _warn_of_validation(frame: FrameType, epsilon: object, delta: object) -> None:
    """Warn at the first clone of a cross-validation, or of a curve of many of them."""
    names = frame.f_locals
    if names["parallel"] in _warned:
        return
    _warned.add(names["parallel"])
    n_fits = None
    if frame.f_code.co_name in ("cross_validate", "cross_val_predict"):
        try:
            n_fits = names["cv"].get_n_splits(names["X"], names["y"], names["groups"])
        except (AttributeError, KeyError, TypeError, ValueError):
            n_fits = None  # another version of scikit-learn: warn without the number
    _warn("cross-validation", n_fits, epsilon, delta)


def _warn(
    caller: str, n_fits: int | None, epsilon: Any, delta: Any, totals: list[Any] | None = None
) -> None:
    """Warn of `n_fits` fits: by composition their costs add up to `totals`.

    By default each of them is (epsilon, delta)-DP.
    """
    total = "many times as much"
    if n_fits and isinstance(epsilon, int | float) and isinstance(delta, int | float):
        sums = totals or [n_fits * epsilon, n_fits * delta]
        total = f"epsilon {sums[0]:g} at delta {sums[1]:g} ({n_fits} fits)"
    warnings.warn(
        f"{caller} fits this private estimator several times: all fits together cost {total}, not "
        f"epsilon {epsilon}, and the scores on private records are not paid for at all. Pass "
        "ledger=tacit.Ledger(FILE) to pay for every fit.",
        UncountedFits,
        stacklevel=2,
    )
