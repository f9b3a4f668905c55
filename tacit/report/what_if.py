"""What a run would have cost with other noise or another number of steps, priced in advance.

The page of a run holds the prices of a small grid, so that a reader can move a control without any
computation in the browser. All prices are those of the run's own event with numbers replaced.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tacit import accounting
from tacit.errors import NotCertified, UnsupportedEvent
from tacit.events import Relation, from_dict
from tacit.experiments import Facts
from tacit.report.figures import Figure, Role, Series

NOISE = tuple(2 ** (k / 4) for k in range(-4, 9))  # factors on the noise: from a half to four
STEPS = {0.5: "half the steps", 1.0: "the steps of this run", 2.0: "twice the steps"}
_ROLES = {0.5: Role.OTHER, 1.0: Role.PRIVATE, 2.0: Role.FOURTH}
_COUNTS = {"Repeated": "count", "BandedGaussian": "steps"}  # fields that count steps, by event


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Prices of a run with other noise, and with other numbers of steps if it has any.

    `epsilons` has a row for each of `steps`, and in it an epsilon for each entry of `noise`, which
    holds noise multipliers, or factors on all of them if the run has several; `label` says which.
    `start` is the place of the run itself in `noise`.
    """

    label: str
    noise: tuple[float, ...]
    steps: tuple[str, ...]
    epsilons: tuple[tuple[float, ...], ...]
    delta: float
    start: int

    @property
    def figure(self) -> Figure:
        """Epsilon against the noise multiplier, with a line for each number of steps."""
        roles = {STEPS[factor]: role for factor, role in _ROLES.items()}
        return Figure(
            name="what-if",
            title="Epsilon at other noise",
            caption=f"Price, at delta {self.delta:g}, of runs like this one that were planned so.",
            x_label=self.label,
            y_label="epsilon",
            x_log=True,
            y_log=True,
            series=tuple(
                Series(name=name, x=self.noise, y=row, role=roles[name])
                for name, row in zip(self.steps, self.epsilons, strict=True)
            ),
        )

    @property
    def data(self) -> dict[str, Any]:  # Any: JSON values
        """What the script of the page needs: texts of the noise and of the epsilons."""
        return {
            "label": self.label,
            "noise": [f"{value:.3g}" for value in self.noise],
            "steps": list(self.steps),
            "epsilons": [[_rounded_up(value) for value in row] for row in self.epsilons],
            "delta": f"{self.delta:g}",
        }

    @property
    def words(self) -> str:
        """What the control says before it is moved."""
        row = self.steps.index(STEPS[1.0])
        epsilon, data = self.data["epsilons"][row][self.start], self.data
        where = f"{self.label} {data['noise'][self.start]}"
        return f"{where}, {STEPS[1.0]}: epsilon {epsilon} at delta {data['delta']}"


def what_if(facts: Facts) -> WhatIf | None:
    """Return the prices of a run like the one with these facts, with other noise.

    None if the run has no noise multiplier, as with pure prices, or if a price is not certified. Of
    DP-SGD, only the noise of the training steps changes; a paid evaluation stays as it is. Of a run
    with several noise multipliers and no main one, all of them change together.
    """
    main = facts.hyperparameters.get("noise_multiplier")
    every = _multipliers(facts.event)
    if main is None and len(every) == 1:
        (main,) = every
    if not every or not all(0 < value < math.inf for value in every):
        return None
    changed = _Changed(main)
    has_steps = main is not None and changed(facts.event, 1.0, 2.0) != facts.event
    factors = [f for f in STEPS if has_steps or f == 1.0]
    try:
        rows = [
            tuple(_price(facts, changed(facts.event, noise, steps)) for noise in NOISE)
            for steps in factors
        ]
    except (NotCertified, UnsupportedEvent, ValueError):
        return None
    if len(set(rows[0])) == 1 or not all(0 < value < math.inf for row in rows for value in row):
        return None
    return WhatIf(
        label="noise, times that of this run" if main is None else "noise multiplier",
        noise=tuple((1.0 if main is None else float(main)) * noise for noise in NOISE),
        steps=tuple(STEPS[factor] for factor in factors),
        epsilons=tuple(rows),
        delta=facts.delta,
        start=NOISE.index(1.0),
    )


@dataclass(frozen=True)
class _Changed:
    """Changes the releases of an event whose noise multiplier is `multiplier`; None means all."""

    multiplier: float | None

    def __call__(self, event: Any, noise: float, steps: float) -> Any:  # Any: JSON values
        """Return an event's JSON with noise and number of steps multiplied by these factors."""
        if isinstance(event, list):
            return [self(part, noise, steps) for part in event]
        if not isinstance(event, Mapping):
            return event
        found = {name: self(value, noise, steps) for name, value in event.items()}
        if self._is_meant(event.get("noise_multiplier")):
            found["noise_multiplier"] = noise * event["noise_multiplier"]
        count = _COUNTS.get(str(event.get("type")))
        if count in event and self._is_inside(event):
            found[count] = max(1, round(steps * event[count]))
        return found

    def _is_meant(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        return self.multiplier is None or math.isclose(value, self.multiplier)

    def _is_inside(self, event: Any) -> bool:  # Any: JSON values
        if isinstance(event, list):
            return any(map(self._is_inside, event))
        if not isinstance(event, Mapping):
            return False
        inside = any(map(self._is_inside, event.values()))
        return self._is_meant(event.get("noise_multiplier")) or inside


def _multipliers(event: Any) -> set[float]:  # Any: JSON values
    """Return the noise multipliers in an event's JSON."""
    if isinstance(event, list):
        return {value for part in event for value in _multipliers(part)}
    if not isinstance(event, Mapping):
        return set()
    own = event.get("noise_multiplier")
    inside = {value for part in event.values() for value in _multipliers(part)}
    return inside | ({own} if isinstance(own, int | float) else set())


def _price(facts: Facts, event: Mapping[str, Any]) -> float:  # Any: JSON values
    relation = Relation(facts.relation)
    return accounting.epsilon(from_dict(event), delta=facts.delta, relation=relation)


def _rounded_up(value: float) -> str:
    """Return four digits of an epsilon, never below it."""
    digits = 3 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits) / 10**digits:.4g}"
