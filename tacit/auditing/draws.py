"""Tests of draws: which records took part in which step, seen through the releases.

Some records of the data set, at random places, become canaries: a canary in the lot adds exactly
one clip norm to a coordinate of its own. With almost no noise, the release therefore shows who took
part. A table of participation, with one row for each step and one column for each canary, is then
compared with the sampling that was billed.
"""

from collections.abc import Sequence
from math import comb

import numpy as np
from scipy import special, stats

from tacit._arrays import Flags, Floats, Indices
from tacit.auditing.p_values import (
    Finding,
    deterministic,
    dispersion_p,
    normal_p,
    smallest,
    two_sided,
)
from tacit.events import BandedGaussian
from tacit.mechanisms import Rng

_EXACT = 1e-3  # a contribution this close to a whole number is that number
_MOST_PAIRS = 5000  # pairs of canaries whose joint participation is compared


def random_places(n_records: int, n_canaries: int, random: Rng) -> Indices:
    """Return places for canaries in order: all records if they are few, else neighbors at random.

    Half of the canaries follow another one directly, so that neighbors can be compared. The first
    and the last record are always included.
    """
    if n_records <= n_canaries:
        return np.arange(n_records)
    starts = np.argsort(random.random(n_records - 1))[: n_canaries // 2 - 1]
    places = np.concatenate([starts, starts + 1, [0, n_records - 1]])
    return np.unique(places)


def draw_findings(
    contributions: Floats, places: Indices, rate: float, *, is_poisson: bool
) -> tuple[Finding, ...]:
    """Compare contributions, of shape (steps, canaries) and in clip norms, with the billed draws.

    `places` are the canaries' places in the data set, and `rate` is the billed sampling rate. Only
    Poisson sampling is compared in full; for other samplers the contributions alone are tested.

    >>> rng = np.random.default_rng(0)
    >>> drawn = (rng.random((64, 200)) < 0.25).astype(float)
    >>> good = draw_findings(drawn, np.arange(200), 0.25, is_poisson=True)
    >>> min(finding.p_value for finding in good) > 0.001
    True
    >>> drawn[::2] = drawn[1::2]                                   # every lot is used twice
    >>> bad = draw_findings(drawn, np.arange(200), 0.25, is_poisson=True)
    >>> min(finding.p_value for finding in bad) < 1e-6
    True
    """
    whole = np.round(contributions)
    is_whole = bool(np.all(np.abs(contributions - whole) < _EXACT))  # false for NaN
    is_once = bool(np.isin(whole, (0.0, 1.0)).all())
    tests = {"a record adds one clip norm or nothing": deterministic(is_whole and is_once)}
    if is_poisson and is_once:
        drawn = whole > 0
        steps, n = drawn.shape
        tests |= {
            "rate": binomial_p(int(drawn.sum()), drawn.size, rate),
            "rate of every place": smallest(
                binomial_p(int(count), steps, rate) for count in drawn.sum(axis=0)
            ),
            "rate of every step": smallest(
                binomial_p(int(count), n, rate) for count in drawn.sum(axis=1)
            ),
            "independence of places": dispersion_p(drawn.sum(axis=1), n, rate),
            "independence of steps": dispersion_p(drawn.sum(axis=0), steps, rate),
            "independence of neighbors": _followers(drawn, places, rate),
            "independence of consecutive steps": _followers(drawn.T, np.arange(steps), rate),
            "no lot is like another one": _overlaps(drawn),
            "no record is drawn like another one": _overlaps(_some_columns(drawn).T),
            "independence of the place in the data set": _trend(drawn, places, rate),
        }
    return tuple(Finding("draws", name, p_value) for name, p_value in tests.items())


def turn_findings(
    runs: Sequence[Floats], places: Indices, event: BandedGaussian
) -> tuple[Finding, ...]:
    """Compare contributions with a billed run in which records take turns.

    `runs` are tables as in `draw_findings`, one for each run: all steps of a record must be far
    enough apart and few enough. If turns are drawn at a rate, they are a fixed number of steps
    apart, so that a record has one in every so many steps: each is taken with that chance, and a
    fair coin decides which step it is.

    >>> event = BandedGaussian(1.0, (0.8, 0.6), steps=64, separation=2, rate=0.5)
    >>> rng = np.random.default_rng(1)
    >>> group, is_drawn = rng.integers(0, 2, 200), rng.random((64, 200)) < 0.5
    >>> table = (is_drawn & (np.arange(64)[:, None] % 2 == group)).astype(float)
    >>> good = turn_findings([table], np.arange(200), event)
    >>> min(finding.p_value for finding in good) > 0.001
    True
    >>> bad = turn_findings([is_drawn.astype(float)], np.arange(200), event)  # in any step
    >>> min(finding.p_value for finding in bad)
    0.0
    """
    apart, most = event.separation, event.participations or -(-event.steps // event.separation)
    is_apart = is_rare = is_cyclic = True
    folded, firsts = [], []
    for table in runs:
        drawn = np.round(table) > 0
        for column in drawn.T:
            steps = np.flatnonzero(column)
            is_apart &= bool((np.diff(steps) >= apart).all())
            is_rare &= len(steps) <= most
            is_cyclic &= bool((np.diff(steps) % apart == 0).all())
            firsts += steps[:1].tolist()
        whole = len(table) - len(table) % apart
        folded.append(np.add.reduceat(table[:whole], np.arange(0, whole, apart), axis=0))
    tests = {
        "the steps of a record are as far apart as billed": deterministic(is_apart),
        "a record takes part as seldom as billed": deterministic(is_rare),
    }
    found = draw_findings(np.concatenate(folded), places, event.rate, is_poisson=event.rate < 1)
    if event.rate < 1:
        counts = np.bincount(np.array(firsts, np.int64) % apart, minlength=apart)
        tests |= {
            "a record has its turn at the same places throughout": deterministic(is_cyclic),
            "turns are given by fair coins": float(stats.chisquare(counts).pvalue),
        }
    return (*(Finding("draws", name, p_value) for name, p_value in tests.items()), *found)


def binomial_p(count: int, trials: int, rate: float) -> float:
    """Return the two-sided p-value of `count` successes in `trials` at `rate`."""
    lower = float(special.bdtr(count, trials, rate))
    upper = float(special.bdtrc(count - 1, trials, rate)) if count > 0 else 1.0
    return two_sided(lower, upper)


def _followers(drawn: Flags, places: Indices, rate: float) -> float:
    """Compare how often a neighbor of a drawn column is drawn too with how often that was billed.

    Columns are neighbors if their places are. Pairs that share no column are counted together:
    given the draws of the first columns, the count is binomial.
    """
    first = np.flatnonzero(np.diff(places) == 1)
    found = []
    for parity in (0, 1):
        chosen = first[first % 2 == parity]
        trials = int(drawn[:, chosen].sum())
        both = int((drawn[:, chosen] & drawn[:, chosen + 1]).sum())
        found.append(binomial_p(both, trials, rate) if trials else 1.0)
    return smallest(found)


def _overlaps(drawn: Flags) -> float:
    """Compare every two rows: how many columns they share, given how many each has."""
    rows, n = drawn.shape
    if rows < 2:
        return 1.0
    counts = drawn.sum(axis=1)
    shared = drawn.astype(np.float64) @ drawn.T.astype(np.float64)
    i, j = np.triu_indices(rows, 1)
    law = stats.hypergeom(n, counts[i], counts[j])
    common = shared[i, j].round().astype(int)
    upper, lower = law.sf(common - 1), law.cdf(common)
    return float(min(1.0, 2 * comb(rows, 2) * np.minimum(upper, lower).min()))


def _some_columns(drawn: Flags) -> Flags:
    most = int(np.sqrt(2 * _MOST_PAIRS))
    chosen = np.linspace(0, drawn.shape[1] - 1, min(most, drawn.shape[1])).astype(int)
    return drawn[:, np.unique(chosen)]


def _trend(drawn: Flags, places: Indices, rate: float) -> float:
    """Compare early places with late ones, and even places with odd ones."""
    counts = drawn.sum(axis=0) - len(drawn) * rate
    found = []
    for weights in (places - places.mean(), (places % 2) - (places % 2).mean()):
        spread = np.sqrt(float((weights**2).sum()) * len(drawn) * rate * (1 - rate))
        found.append(normal_p(float(weights @ counts) / spread) if spread > 0 else 1.0)
    return smallest(found)
