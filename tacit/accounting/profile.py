"""Privacy profiles: the curve delta(t) of one pair of laws, with both bounds, at finitely many t.

With P and Q the output laws on two neighbors, delta(t) = sup over events S of P(S) - exp(t) Q(S),
for every real t. As a function of l = exp(t) it is convex, falls from 1 at l = 0, and is at least
1 - l. Three things follow from bounds at nodes, each of them proved between the nodes too:

* chords between upper bounds lie above the curve (`Profile.above`). They are the curve of a
  pair on finitely many losses that dominates P and Q (`Profile.dominating`);
* lines through neighboring nodes, extended, lie below it. Their convex minorant is the curve of
  a pair that P and Q dominate (`Profile.dominated`), hence of a function of the output (Blackwell);
* the largest power of a test of size a is at most min over t of exp(t) a + delta(t)
  (`Profile.power`).

All three are lower convex hulls of points in a plane (`lower_hull`).
"""

from typing import NamedTuple

import numpy as np

from tacit._arrays import Floats, Indices
from tacit.accounting.one_event import ROUND
from tacit.accounting.pld.loss_laws import Discrete

FARTHEST = 300.0
"""Largest |t| of a node: beyond it, exp(t) times exp(t) leaves the range of floats."""
_LOWEST = -14.0
"""Least t of the nodes from which a dominated pair is made."""


class Pair(NamedTuple):
    """A pair of laws on finitely many outcomes, by increasing likelihood ratio."""

    p: Floats
    q: Floats

    def loss_law(self) -> Discrete:
        """Return the law of the privacy loss log(p / q), losses rounded down."""
        both = (self.p > 0) & (self.q > 0)
        p, q = self.p[both], self.q[both]
        infinite, vanishing = float(self.p[self.q == 0].sum()), float(self.q[self.p == 0].sum())
        loss = np.minimum.accumulate(np.log(p / q)[::-1])[::-1]
        return Discrete(
            tuple(loss.tolist()), tuple(p.tolist()), tuple(q.tolist()), infinite, vanishing
        )


class Profile(NamedTuple):
    """Proved bounds of delta(t), P against Q, at the nodes `t`, which increase.

    `reverse` bounds of Q against P are not needed: delta(-t) = 1 - exp(-t) + exp(-t) delta'(t),
    where delta' is the profile in the other direction (`two_sided`).
    """

    t: Floats
    lower: Floats
    upper: Floats

    @staticmethod
    def two_sided(t: Floats, own: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> "Profile":
        """Return the profile at -t and t, given bounds (lower, upper) in both directions at t >= 0.

        `t` increases from 0; `own` is P against Q, `other` Q against P.
        """
        shrink = np.exp(-t[:0:-1])
        mirrored = [-np.expm1(-t[:0:-1]) + shrink * bound[:0:-1] for bound in other]
        lower, upper = (np.concatenate(sides) for sides in zip(mirrored, own, strict=True))
        nodes = np.concatenate((-t[:0:-1], t))
        # Neither end may rise with t: a bound at one node holds at all nodes on one side of it.
        lower = np.maximum.accumulate(lower[::-1])[::-1] * (1 - 8 * ROUND)
        upper = np.minimum.accumulate(np.minimum(upper, 1.0)) * (1 + 8 * ROUND)
        return Profile(nodes, np.minimum(lower, upper), np.minimum(upper, 1.0))

    def hull(self) -> "Profile":
        """Return the nodes of the largest convex curve of which no upper bound is below."""
        keep = lower_hull(np.exp(self.t), self.upper)
        return Profile(self.t[keep], self.lower[keep], self.upper[keep])

    def above(self, t: Floats) -> Floats:
        """Return an upper bound of delta at each of `t`; the nodes must be those of `hull`."""
        # Left of the first node, delta <= 1 at l = 0; right of the last one delta does not rise.
        i = np.clip(np.searchsorted(self.t, t, side="right"), 1, len(self.t) - 1)
        left, right = self.t[i - 1], self.t[i]
        share = np.expm1(np.minimum(t, right) - left) / np.expm1(right - left)
        chord = self.upper[i - 1] + np.clip(share, 0.0, 1.0) * (self.upper[i] - self.upper[i - 1])
        first = 1 - np.exp(np.minimum(t - self.t[0], 0.0)) * (1 - self.upper[0])
        return np.where(t < self.t[0], first, chord) * (1 + 32 * ROUND)

    def power(self) -> tuple[Floats, Floats]:
        """Return the corners (size, power) of an upper bound on the power of tests of each size."""
        # The line of slope l and height delta bounds the power; the line l = 0 has height 1.
        hull = self.hull()
        ratio, delta = np.append(0.0, np.exp(hull.t)), np.append(1.0, hull.upper)
        size = np.maximum(-np.diff(delta) / np.diff(ratio), 0.0)[::-1]
        power = ratio[:0:-1] * size + delta[:0:-1]
        size, power = np.append(0.0, np.minimum(size, 1.0)), np.append(delta[-1], power)
        return np.append(np.maximum.accumulate(size), 1.0), np.append(np.minimum(power, 1.0), 1.0)

    def dominating(self) -> Discrete:
        """Return the law of the loss of a pair that dominates this one."""
        hull = self.hull()
        ratio = np.append(0.0, np.exp(hull.t))
        delta = np.append(1.0, hull.upper)
        slope = np.append(np.diff(delta) / np.diff(ratio), 0.0)  # minus the Q-mass of larger ratios
        q = np.maximum(np.diff(slope), 0.0)
        keep = q > 0
        q, at = q[keep], hull.t[keep]
        vanishing = max(1 + float(slope[0]), 0.0)
        p = q * np.exp(at)
        losses, p, q = (tuple(values.tolist()) for values in (at, p, q))
        return Discrete(losses, p, q, float(hull.upper[-1]), vanishing)

    def dominated(self) -> Pair:
        """Return a pair that this one dominates, so that it is a function of the output.

        Between nodes i and i + 1, the curve is above the line through nodes i - 1 and i and above
        the line through nodes i + 1 and i + 2: with the value where the lower of them is least, the
        polygon through these points and the nodes is below the curve, and so is its lower hull.
        """
        some = self.t > _LOWEST  # near l = 0, rounding of delta near 1 would swamp the slope
        some[1:] &= np.diff(np.exp(self.t)) > 0  # ratios that are the same float: one is enough
        ratio = np.append(0.0, np.exp(self.t[some]))
        low = np.maximum(np.append(1.0, self.lower[some]), np.maximum(1 - ratio, 0.0))
        low[-1] = 0.0
        high = np.maximum(np.append(1.0, self.upper[some]), low)
        gap = np.diff(ratio)
        before = np.append(-1.0, (low[1:] - high[:-1]) / gap)[:-1]  # slope that ends at node i
        after = np.append((low[:-1] - high[1:]) / -gap, 0.0)[1:]  # slope that starts at node i + 1
        with np.errstate(divide="ignore", invalid="ignore"):
            at = (low[1:] - low[:-1] - after * gap) / (before - after)
        at = np.clip(np.nan_to_num(at), 0.0, gap)
        value = np.minimum(low[:-1] + before * at, low[1:] + after * (at - gap))
        x = np.concatenate((ratio, ratio[:-1] + at))
        y = np.concatenate((low, np.maximum(value, np.maximum(1 - ratio[:-1] - at, 0.0))))
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
        keep = lower_hull(x, y)
        x, y = x[keep], y[keep]
        # Near l = 0, rounding of y may have made a slope less than -1, which no pair has.
        slope = np.append(np.maximum(np.diff(y) / np.diff(x), -1.0), 0.0)
        q = np.append(1 + slope[0], np.maximum(np.diff(slope), 0.0))
        # Mixed with a little of a pair of equal laws: this is more than rounding may have added.
        p, q = q * x * (1 - 1e-9), q * (1 - 1e-9)
        equal = int(np.searchsorted(x, 1.0))
        rest = max(min(1 - p.sum(), 1 - q.sum()), 0.0)
        p, q = (np.insert(mass, equal, rest) for mass in (p, q))
        return Pair(p, q)


def lower_hull(x: Floats, y: Floats) -> Indices:
    """Return the indices of the corners of the lower convex hull of points; `x` must not fall."""
    xs, ys = x.tolist(), y.tolist()
    kept: list[int] = []
    for i, (at, value) in enumerate(zip(xs, ys, strict=True)):
        if kept and at == xs[kept[-1]]:
            if value >= ys[kept[-1]]:
                continue
            kept.pop()
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (ys[b] - ys[a]) * (at - xs[a]) < (value - ys[a]) * (xs[b] - xs[a]):
                break
            kept.pop()
        kept.append(i)
    return np.array(kept)
