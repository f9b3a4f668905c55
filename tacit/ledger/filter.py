"""The RDP filter: a stopping rule that stays valid when entries depend on earlier releases.

**The rule.** A filter is a set of measures, each with a share of delta and a limit. It admits
entries as long as, with them included, at least one measure is within its limit *and* the deltas of
`ApproximateDP` parts sum to at most `set_aside * delta`. Of the rest, (1 - set_aside) * delta,

- order a gets the share w_a. Its limit is the Rényi divergence that converts to (epsilon, share)
  by Canonne, Kamath & Steinke 2020, Prop. 12 (arXiv:2004.00010v4). A sum of divergences of one
  order, kept under a limit, is a valid filter: Feldman & Zrnic 2021, Thm. 4.3 (arXiv:2008.11193);
- mu-GDP gets the share w_g. Its limit is the mu^2 at which a Gaussian is exactly (epsilon, share).
  Sums of mu^2 kept under a limit are a valid filter: Smith & Thakurta 2022 (arXiv:2210.17520);
- copies of one event E, the first entry's own, get the share w_c. Their limit is the largest N for
  which E repeated N times costs (epsilon, share) by the tightest accountant. An entry counts as the
  number of copies that dominate it, or as infinity. N copies reserved in advance cover a run that
  uses at most N of them, whatever each computes from earlier releases: mechanisms dominated by one
  pair, composed adaptively, are dominated by the product of the pairs (Zhu, Dong & Wang 2022,
  Thm. 10, arXiv:2106.08567), and stopping early is post-processing;
- pure epsilons are summed up to epsilon and need no share.

A running total of privacy loss distributions or of trade-off curves ("continue while the curve of
the events so far is within the budget") is **not** a valid measure when events are chosen
adaptively (arXiv:2602.06756), and no measure here is one. `tests/ledger/test_copies.py` has a
counterexample of two rounds.

**Proof** that admitted entries are (epsilon, delta)-DP, for neighbors P, Q (laws of the transcript)
and any set E of outputs. Suppose first that there are no `ApproximateDP` parts. Every final
transcript is within the limit of some measure; let E_m be the part of E whose first such measure
is m. Sums never decrease, so along a transcript in E_m a filter with measure m alone would never
have stopped: both processes give E_m the same probability. That filter is (epsilon, share_m)-DP, so
P(E_m) <= e^epsilon Q(E_m) + share_m. Add over m. Choosing the best order *without* shares would be
wrong, because which order is best depends on what was released.
With `ApproximateDP` parts, part t is pure with probability 1 - delta_t, whatever came before, so
P(E) <= P(E, all pure) + P(some part not pure). The last is at most sup sum delta_t, the amount set
aside. On "all pure" both laws have the same factor, the product of 1 - delta_t, which is at most 1
and is a function of the transcript, so the argument above holds for it.

**The first entry** is chosen before any release, hence fixed, and may be priced whole by the
tightest accountant (PLD). If the filter admits it too, the filter covers every transcript. If not,
then no later entry is admitted either (sums never decrease), and the price of the first entry
alone is the whole cost. In both cases the budget holds. Orders and shares are fitted to the first
entry and the budget, which are both known before anything is released, and then never change.

**Partitions.** A record of partition p meets the entries labeled p and the unlabeled ones; all
others run the same on both neighbors, so they are post-processing for it. The rules above apply
to the entries that a record meets, given what the others released; every partition must pass. The
first entry that a record meets is fixed given the others, so it too may be priced whole.

**Plans** reserve everything before their first step, so their steps may interleave with other
entries: concurrent composition holds for these filters (Haney et al. 2023, arXiv:2309.05901).
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr

from tacit import accounting
from tacit._check import in_closed_unit, non_negative
from tacit.accounting import calibrate_count, exact, flatten, gaussian_delta, round_up
from tacit.errors import NotCertified, UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    Event,
    Gaussian,
    PureDP,
    Relation,
    Repeated,
    from_dict,
)
from tacit.ledger.entry_cost import Cost, price

_MARGIN = 1 - 1e-12  # limits are rounded down by more than the rounding error of a price
_NO_BUDGET_ORDERS = (1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0, 22.0, 36.0, 64.0, 128.0, 256.0)
_MAIN = 0.80  # share of the measure that suits the first entry best
_COPIES = 0.90  # share of copies, where they are the main measure
_BESIDE_COPIES = 0.02  # share of mu-GDP, and of the best order, beside copies
_ASIDE_OF_COPIES = 0.05  # part of delta that is kept for `ApproximateDP` entries beside copies
_AROUND = ((1.7, 0.04), (0.6, 0.06), (4.0, 0.02))
"""Other orders, as ratios of (order - 1), and their shares; 0.08 is left for the other measure."""


@dataclass(frozen=True)
class Budget:
    """The most that all entries of a ledger together may cost: (`epsilon`, `delta`)-DP.

    `delta` 0 means pure differential privacy: only entries that have a pure epsilon are admitted.

    >>> str(Budget(epsilon=1.0, delta=1e-5))
    'epsilon 1, delta 1e-05'
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", non_negative(epsilon=self.epsilon))
        delta = in_closed_unit(delta=self.delta)
        if delta == 1:
            raise ValueError("delta must be in [0, 1), got 1. Choose it well below 1 / records.")
        object.__setattr__(self, "delta", delta)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g}, delta {self.delta:g}"


class Remaining(NamedTuple):
    """What one more entry, chosen after seeing all earlier releases, may cost at most.

    The fields are alternatives: one entry may use up any one of them. An empty ledger may admit
    more than this, because its first entry is priced by a tighter accountant.
    """

    epsilon: float
    """A pure release up to this epsilon is admitted (for an event of replace factor 1)."""
    delta: float
    """Sum of deltas that `ApproximateDP` entries may still have."""
    noise_multiplier: float
    """A Gaussian release with this multiplier or more is admitted (replace factor 1)."""
    fraction: float
    """Share of the budget that is unspent, by the measure with most room."""
    copies: int = 0
    """So many copies of the event that the ledger began with, where copies are counted."""
    copied_event: Event | None = None
    """The event whose copies are counted: one step of the run that the ledger began with."""

    def __str__(self) -> str:
        ways = [words for _, words in self._ways()]
        if self.fraction == 0 or not ways:
            return "nothing"
        return f"{100 * self.fraction:.3g} % of the budget's room, for {', or for '.join(ways)}"

    def prices(self, *, delta: float, relation: Relation) -> list[tuple[float, str]]:
        """Return what the next run may cost by itself at `delta`, for each kind of run, in words.

        Costs of several runs do not add up exactly, so this is not the budget minus what was spent.
        """
        if self.fraction == 0:
            return []
        return [
            (accounting.epsilon(event, delta=delta, relation=relation) if delta else bound, words)
            for (event, bound), words in self._ways()
        ]

    def _ways(self) -> list[tuple[tuple[Event, float], str]]:
        """Return the largest event of each kind that is admitted, its pure epsilon, and words."""
        ways: list[tuple[tuple[Event, float], str]] = []
        if self.copied_event is not None and self.copies > 0:
            event = Repeated(self.copied_event, self.copies)
            words = f"a run like the first ({self.copies:,} releases of its sampling and noise)"
            ways.append(((event, math.inf), words))
        if 0 < self.noise_multiplier < math.inf:
            event = Gaussian(self.noise_multiplier, replace_factor=1.0)
            words = f"one Gaussian release of noise multiplier {self.noise_multiplier:.4g}"
            ways.append(((event, math.inf), words))
        if 0 < self.epsilon < math.inf:
            event = PureDP(self.epsilon, replace_factor=1.0)
            words = f"one pure release of epsilon {self.epsilon:.4g}"
            ways.append(((event, self.epsilon), words))
        return ways

    @staticmethod
    def least(left: "list[Remaining]") -> "Remaining":
        """Return what remains for an entry that needs room in all of `left`."""
        return Remaining(
            epsilon=min(one.epsilon for one in left),
            delta=min(one.delta for one in left),
            noise_multiplier=max(one.noise_multiplier for one in left),
            fraction=min(one.fraction for one in left),
            copies=min(one.copies for one in left),
            copied_event=left[0].copied_event,
        )


UNLIMITED = Remaining(math.inf, 1.0, 0.0, 1.0)  # what remains of a ledger without a budget


@dataclass(frozen=True)
class Filter:
    """The rule that admits entries: a share of delta for each Rényi order; proof in `filter`."""

    orders: tuple[float, ...]
    shares: tuple[float, ...]
    gaussian_share: float
    set_aside: float
    """Part of delta that pays for the deltas of `ApproximateDP` entries."""
    copied_event: Event | None = None
    """The event whose copies are counted; None if none are."""
    copies: int = 0
    """How many copies the budget admits."""
    copies_share: float = 0.0

    def to_json(self) -> str:
        """Return the filter as one line of JSON."""
        data = asdict(replace(self, copied_event=None))
        if self.copied_event is None:
            for name in ("copied_event", "copies", "copies_share"):
                del data[name]
        else:
            data["copied_event"] = self.copied_event.to_dict()
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> "Filter":
        """Return the filter that `to_json` wrote."""
        data = json.loads(text)
        orders, shares = tuple(data["orders"]), tuple(data["shares"])
        plain = Filter(orders, shares, data["gaussian_share"], data["set_aside"])
        if "copied_event" not in data:
            return plain
        event = from_dict(data["copied_event"])
        copies, share = int(data["copies"]), float(data["copies_share"])
        return replace(plain, copied_event=event, copies=copies, copies_share=share)

    def admits(self, total: Cost, budget: Budget) -> bool:
        """Return whether entries that cost `total` together are within `budget`."""
        limits = limits_of(self, budget)
        pairs = zip(total.measures, limits.measures, strict=True)
        return total.delta <= limits.delta and any(value <= limit for value, limit in pairs)

    def epsilon(self, total: Cost, *, delta: float) -> float:
        """Return an epsilon that bounds the loss so far at all times, except with chance `delta`.

        With L the privacy loss so far and `total` the summed Rényi divergences of order a,
        exp((a - 1)(L - total)) is a supermartingale with mean at most 1. By Ville's inequality
        L <= total + log(1 / share) / (a - 1) at all times at once, except with probability `share`
        (the odometer of Whitehouse et al. 2023, arXiv:2203.05481, at a fixed order). The shares sum
        to (1 - set_aside) * delta, where `set_aside` is the part of delta kept for `ApproximateDP`
        entries. Valid however the entries and the moment of this call were chosen.
        """
        if total.delta > exact(delta) * exact(self.set_aside):
            return math.inf
        bounds = [round_up(total.pure)]
        convertible = delta * (1 - self.set_aside)
        if convertible > 0:
            bounds += [
                value + math.log(sum(self.shares) / (share * convertible)) / (order - 1)
                for order, share, value in zip(self.orders, self.shares, total.renyi, strict=True)
            ]
        return min(bounds)

    def remaining(self, total: Cost, budget: Budget) -> Remaining:
        """Return what one more entry may cost if the entries so far cost `total` together."""
        limits = limits_of(self, budget)
        if total.delta > limits.delta:
            return Remaining(0.0, 0.0, math.inf, 0.0)
        pairs = list(zip(limits.measures, total.measures, strict=True))
        *renyi, gaussian, _, pure = (max(0.0, float(limit - spent)) for limit, spent in pairs)
        # The divergence of a pure mechanism is at most epsilon and at most order * epsilon^2 / 2
        # (Bun & Steinke 2016, Prop. 3.3), that of a Gaussian order / (2 multiplier^2).
        squares = [2 * left / order for order, left in zip(self.orders, renyi, strict=True)]
        by_order = [max(left, math.sqrt(s)) for left, s in zip(renyi, squares, strict=True)]
        half = math.sqrt(gaussian) / 2  # the inverse of `gdp_mu_squared`
        by_order.append(float(log_ndtr(half) - log_ndtr(-half)))
        largest = max([gaussian, *squares])
        copies = max(0.0, limits.copies - total.copies)
        left = zip((*renyi, gaussian, copies, pure), limits.measures, strict=True)
        return Remaining(
            epsilon=max([pure, *(value * (1 - 1e-5) for value in by_order)]),
            delta=float(limits.delta - total.delta),
            noise_multiplier=(1 + 1e-8) / math.sqrt(largest) if largest > 0 else math.inf,
            fraction=max(room / float(limit) if limit > 0 else 0.0 for room, limit in left),
            copies=int(copies),
            copied_event=self.copied_event,
        )


def fit(budget: Budget | None, event: Event, relation: Relation) -> Filter:
    """Return the filter for a ledger whose first entry is `event`, with room for more like it.

    A tenth of delta is set aside for `ApproximateDP` entries; more if the first entry has a delta,
    up to all of it: then epsilons and deltas add. Of the rest, 80 % goes to the measure (a Rényi
    order or mu-GDP) that admits most repetitions of `event`, and 20 % to the other measures. Where
    copies of the event's one part admit more, a twentieth is set aside and copies get 90 %.
    """
    has_delta = price(event, orders=(), relation=relation).delta > 0
    if budget is None:
        equal = (1 / len(_NO_BUDGET_ORDERS),) * len(_NO_BUDGET_ORDERS)
        return Filter(_NO_BUDGET_ORDERS, equal, 0.0, 0.5 if has_delta else 0.1)
    if budget.delta == 0 or budget.epsilon == 0:
        return Filter((), (), 0.0, 1.0)
    if not has_delta:
        return _fit_shares(budget, event, relation, set_aside=0.1)
    tried = [_fit_shares(budget, event, relation, set_aside=part) for part in (0.1, 0.5)]
    tried.append(Filter((), (), 0.0, 1.0))
    return max(tried, key=lambda one: _repeats(one, budget, event, relation))


@lru_cache(maxsize=64)
def limits_of(filter_: Filter, budget: Budget) -> Cost:
    """Return the largest total of each measure that `filter_` admits under `budget`."""
    epsilon, delta = budget.epsilon, budget.delta * (1 - filter_.set_aside) * _MARGIN
    shares = zip(filter_.orders, filter_.shares, strict=True)
    return Cost(
        renyi=tuple(_renyi_limit(order, epsilon, share * delta) for order, share in shares),
        gaussian=gaussian_limit(epsilon, filter_.gaussian_share * delta),
        pure=exact(epsilon),
        delta=exact(budget.delta) * exact(filter_.set_aside),
        copies=filter_.copies if filter_.copied_event is not None else -1.0,
    )


def gaussian_limit(epsilon: float, delta: float) -> float:
    """Return the largest mu^2 at which mu-GDP implies (`epsilon`, `delta`)-DP; -1 if none.

    Balle & Wang 2018, Thm. 8 (arXiv:1805.06530), solved for mu by bisection, rounded down.
    """
    if delta <= 0 or epsilon <= 0:
        return -1.0
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) <= delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, epsilon) <= delta else (low, middle)
    return low**2 * _MARGIN


def _renyi_limit(order: float, epsilon: float, delta: float) -> float:
    """Return the largest divergence of `order` that implies (`epsilon`, `delta`)-DP; -1 if none."""
    if delta <= 0:
        return -1.0
    limit = epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)
    return limit * _MARGIN if limit > 0 else -1.0


def _fit_shares(budget: Budget, event: Event, relation: Relation, *, set_aside: float) -> Filter:
    epsilon, delta = budget.epsilon, budget.delta * (1 - set_aside)
    # The order that admits most Gaussian releases, whatever their noise.
    tried = 1 + np.geomspace(1e-2, 1e6, 801)
    limits = epsilon - np.log1p(-1 / tried) + (math.log(delta) + np.log(tried)) / (tried - 1)
    center = float(tried[np.argmax(limits / tried)])
    # A finer grid gains less than 1 % of repetitions. Outside this range there are no limits > 0.
    orders = tuple(float(1 + (center - 1) * ratio) for ratio in np.geomspace(1 / 32, 32, 49))
    cost = price(event, orders=orders, relation=relation)
    repeats = [
        _renyi_limit(order, epsilon, delta) / value if value > 0 else 0.0
        for order, value in zip(orders, cost.renyi, strict=True)
    ]
    most = max([0.0, *repeats])
    aside = min(set_aside, _ASIDE_OF_COPIES)
    # At equal shares copies of a Gaussian gain nothing over mu-GDP, which covers other events too.
    equal = gaussian_limit(epsilon, budget.delta * (1 - aside) * _COPIES)
    least = max(most, equal / cost.gaussian if cost.gaussian > 0 else 0.0)
    counted = _count_copies(budget, event, relation, aside, least=least)
    if counted is not None:
        main = orders[int(np.argmax(repeats))] if most > 0 else center
        around = _filter_around(main, _BESIDE_COPIES, _BESIDE_COPIES, aside)
        shares = (around.shares[0], *(share / 2 for share in around.shares[1:]))
        part, copies = counted
        around = replace(around, shares=shares, copies_share=_COPIES)
        return replace(around, copied_event=part, copies=copies)
    if most <= 0 or most * cost.gaussian <= gaussian_limit(epsilon, delta):
        return _filter_around(center, 0.08, _MAIN, set_aside)
    return _filter_around(orders[int(np.argmax(repeats))], _MAIN, 0.08, set_aside)


def _count_copies(
    budget: Budget, event: Event, relation: Relation, set_aside: float, *, least: float
) -> tuple[Event, int] | None:
    """Return the one part of `event` and how many copies of it the budget admits.

    None if `event` has several parts, if nothing is known to be gained over `least` repetitions of
    `event` by other measures, or if the part cannot be priced.
    """
    parts = flatten(event)
    if len(parts) != 1 or budget.epsilon <= 0:
        return None
    ((part, count),) = parts.items()
    if isinstance(part, ApproximateDP):
        return None
    share = budget.delta * (1 - set_aside) * _MARGIN * _COPIES
    enough = max(2, math.ceil(1.01 * min(least, 1e12) * count))
    try:
        spent = accounting.epsilon(Repeated(part, enough), delta=share, relation=relation)
        if spent > budget.epsilon:
            return None
        copies = calibrate_count(
            lambda n: Repeated(part, n), epsilon=budget.epsilon, delta=share, relation=relation
        )
    except (ValueError, UnsupportedEvent, NotCertified, OverflowError):
        return None
    return part, copies


def copies_fit(filter_: Filter, budget: Budget, relation: Relation) -> bool:
    """Return whether the copies that the filter admits are within the budget's share for them."""
    if filter_.copied_event is None:
        return True
    shares = sum(filter_.shares) + filter_.gaussian_share + filter_.copies_share
    delta = budget.delta * (1 - filter_.set_aside) * filter_.copies_share
    event = Repeated(filter_.copied_event, filter_.copies)
    spent = accounting.epsilon(event, delta=delta, relation=relation)
    return shares <= 1 + 1e-9 and spent <= budget.epsilon * (1 + 1e-6)


def _repeats(filter_: Filter, budget: Budget, event: Event, relation: Relation) -> float:
    """Return how many times `filter_` admits `event`, as a real number, to compare filters."""
    cost = price(event, orders=filter_.orders, relation=relation, copy=filter_.copied_event)
    limits = limits_of(filter_, budget)
    pairs = zip(cost.measures, limits.measures, strict=True)
    by_measure = max(float(b) / float(a) if a > 0 else math.inf for a, b in pairs)
    return min(by_measure, float(limits.delta / cost.delta))


def _filter_around(order: float, share: float, gaussian: float, set_aside: float) -> Filter:
    """Return a filter that gives `share` of delta to `order`, and a little to orders near it.

    `gaussian` is the share of mu-GDP, `set_aside` the part kept for `ApproximateDP` entries.
    """
    orders = (order, *(1 + (order - 1) * ratio for ratio, _ in _AROUND))
    return Filter(orders, (share, *(other for _, other in _AROUND)), gaussian, set_aside)
