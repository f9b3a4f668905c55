"""Calibration: how much noise, sampling or training a budget allows. The inverse of accounting.

The answer is always on the safe side: the event of the answer was priced, and is in the budget.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tacit._check import in_open_unit, positive, whole
from tacit.accounting.one_event import ADD_REMOVE
from tacit.accounting.tightest import Accountant, Tightest
from tacit.events import Event, Relation

_FARTHEST = 2.0**60
_MOST_EVALUATIONS = 300


def calibrate(
    family: Callable[[float], Event],
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant | None = None,
    relation: Relation = ADD_REMOVE,
    bounds: tuple[float, float] | None = None,
    relative: float = 1e-6,
) -> float:
    """Return the x at which `family(x)` spends all of (epsilon, delta) and no more.

    If a larger x costs less, as for noise, the result is the smallest x within the budget. If a
    larger x costs more, as for a sampling rate, it is the largest x. The search detects which case
    holds. The price of the result has been computed and is at most `epsilon`; the result is within
    a factor 1 +- `relative` of the best x.

    `family` returns the event for a positive number x, whose price must rise or fall with x
    throughout. For an x outside its domain, such as a rate above 1, it raises `ValueError`.
    `bounds` are the smallest and largest x allowed; None searches outwards from 1.

    >>> from tacit.events import Gaussian, PoissonSampled, Repeated
    >>> run = lambda noise: Repeated(PoissonSampled(0.01, Gaussian(noise)), 10_000)
    >>> round(calibrate(run, epsilon=1.0, delta=1e-5), 4)
    3.8128
    """
    low, high = bounds or (1 / _FARTHEST, _FARTHEST)
    if not positive(smallest=low) < positive(largest=high):
        raise ValueError(f"bounds must be (smallest, largest), got {bounds}.")
    search = _Search(
        price=_price(family, delta, accountant, relation),
        target=positive(epsilon=epsilon),
        relative=positive(relative=relative),
        limits=(float(low), float(high)),
    )
    return search.run(math.sqrt(low * high))


def calibrate_count(
    family: Callable[[int], Event],
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant | None = None,
    relation: Relation = ADD_REMOVE,
    most: int = 10**12,
) -> int:
    """Return the largest count n, such as a number of steps, with `family(n)` within the budget.

    The budget is (epsilon, delta). If a larger count costs less, return the smallest n within the
    budget. The count is from 1 to `most`; raise `ValueError` if none is within the budget.

    >>> from tacit.events import Gaussian, PoissonSampled, Repeated
    >>> step = PoissonSampled(0.01, Gaussian(4.0))
    >>> calibrate_count(lambda n: Repeated(step, n), epsilon=1.0, delta=1e-5)
    11050
    """
    search = _Search(
        price=_price(lambda x: family(round(x)), delta, accountant, relation),
        target=positive(epsilon=epsilon),
        relative=0.0,
        limits=(1.0, float(whole(most=most, least=1))),
        is_whole=True,
    )
    return round(search.run(1.0))


@dataclass
class _Search:
    """Search, on a log scale, for the x at which `price(x)`, which is monotone, equals `target`.

    `relative` is the precision of x, `limits` the smallest and largest x allowed, `known` the
    prices computed so far. Below, x is "good" if its price is at most the target, else "bad".
    """

    price: Callable[[float], float]
    target: float
    relative: float
    limits: tuple[float, float]
    is_whole: bool = False
    known: dict[float, float] = field(default_factory=dict[float, float])

    def run(self, start: float) -> float:
        """Search from `start`; return the x with the highest price that is at most the target."""
        start = self._clip(start)
        if math.isnan(self._at(start)):
            raise ValueError(
                f"family({start:g}) is outside its domain. Pass bounds=(smallest, largest)."
            )
        toward_good = 1 if self._falls(start) else -1
        if self._at(start) <= self.target:
            good, bad = self._expand(start, -toward_good, until_within=False)
            if bad is None:
                return good  # the whole allowed range is within the budget
        else:
            bad, good = self._expand(start, toward_good, until_within=True)
            if good is None:
                raise ValueError(
                    f"epsilon {self.target:g} cannot be reached: at {bad:g}, the cheapest allowed, "
                    f"the price is {self._at(bad):g}. Raise epsilon or delta, or widen the bounds."
                )
        return self._close_in(bad, good)

    def _at(self, x: float) -> float:
        if x not in self.known:
            if len(self.known) > _MOST_EVALUATIONS:
                raise ValueError("the price must rise or fall steadily with x, and does not.")
            self.known[x] = self.price(x)
        return self.known[x]

    def _clip(self, x: float) -> float:
        """Return the number nearest to x that is within the limits, and whole if it must be."""
        x = min(max(x, self.limits[0]), self.limits[1])
        return float(round(x)) if self.is_whole else x

    def _falls(self, start: float) -> bool:
        """Return whether the price falls as x grows, from two prices near `start` that differ."""
        factor = 2.0
        while factor <= _FARTHEST:
            for x in (self._clip(start * factor), self._clip(start / factor)):
                if x == start or math.isnan(self._at(x)) or self._at(x) == self._at(start):
                    continue
                return (self._at(x) < self._at(start)) == (x > start)
            factor = factor**2
        if self.is_whole and self._at(start) <= self.target:
            return False  # all counts cost the same and fit, so the largest is the best
        raise ValueError(
            f"the price does not change with x around {start:g} (it is {self._at(start):g}), so "
            "there is nothing to calibrate."
        )

    def _expand(self, start: float, sign: int, *, until_within: bool) -> tuple[float, float | None]:
        """Step up (`sign` 1) or down (-1) from `start` until the price crosses the target.

        Return the last x before the crossing and the first x after it, or None if the limits end
        the walk. With `until_within` the crossing is from a bad x to a good one, else the reverse.
        """
        here, stride = start, math.log(2)
        while stride > 1e-9:
            there = self._clip(here * math.exp(sign * stride))
            if there == here:
                break
            if math.isnan(self._at(there)):  # outside the domain
                stride /= 4
                continue
            if (self._at(there) <= self.target) == until_within:
                return here, there
            here, stride = there, min(stride * 2, 8.0)
        return here, None

    def _close_in(self, bad: float, good: float) -> float:
        """Return a good x close enough to a bad one; each new x is interpolated on a log scale."""
        slow, width = 0, abs(math.log(good / bad))
        while abs(good - bad) > 1 if self.is_whole else width > math.log1p(self.relative):
            x = math.sqrt(bad * good) if slow > 1 else self._guess(bad, good)
            if self.is_whole:
                x = min(max(float(round(x)), min(bad, good) + 1), max(bad, good) - 1)
            bad, good = (bad, x) if self._at(x) <= self.target else (x, good)
            last, width = width, abs(math.log(good / bad))
            slow = slow + 1 if width > last / 2 else 0
        return good

    def _guess(self, bad: float, good: float) -> float:
        """Return the next x to try, between `bad` and `good`, from an estimate of the crossing.

        The x is slightly past the estimate, on the side of the farther end of the interval. It then
        replaces that end, so the interval shrinks to the error of the estimate.
        """
        middle, points = math.sqrt(bad * good), self._nearest_points(bad, good)
        if points is None:
            return middle
        crossing = _interpolate_at_zero(points)
        low, high = sorted((math.log(bad), math.log(good)))
        nearer = min(crossing - low, high - crossing)
        past = max(0.4 * math.log1p(self.relative), 0.02 * nearer)
        x = math.exp(crossing + (past if high - crossing > nearer else -past)) if nearer > 0 else 0
        return x if min(bad, good) < x < max(bad, good) else middle

    def _nearest_points(self, bad: float, good: float) -> list[tuple[float, float]] | None:
        """Return two or three points (log(price / target), log x) to interpolate, or None."""
        others = sorted(self.known, key=lambda x: abs(math.log(x / good)))
        found: dict[float, float] = {}
        for x in (bad, good, *others):
            price = self._at(x)
            if 0 < price < math.inf:  # NaN, outside the domain, is left out too
                found.setdefault(math.log(price / self.target), math.log(x))
            elif x in (bad, good):
                return None  # nothing can be interpolated
        return list(found.items())[:3] if len(found) > 1 else None


def _interpolate_at_zero(points: list[tuple[float, float]]) -> float:
    """Return the value at 0 of the polynomial through (key, value) points, in Lagrange's form."""
    total = 0.0
    for i, (key, value) in enumerate(points):
        weight = math.prod(-other / (key - other) for j, (other, _) in enumerate(points) if j != i)
        total += weight * value
    return total


def _price(
    family: Callable[[float], Event],
    delta: float,
    accountant: Accountant | None,
    relation: Relation,
) -> Callable[[float], float]:
    """Return a function from x to the epsilon of family(x); NaN if the family rejects x."""
    delta, relation = in_open_unit(delta=delta), Relation(relation)

    def price(x: float) -> float:
        try:
            event = family(x)
        except ValueError:
            return math.nan
        return (accountant or Tightest()).epsilon(event, delta=delta, relation=relation)

    return price
