"""Closed forms of delta(epsilon): one release, or any number of plain Gaussians."""

import math

import numpy as np

from tacit.accounting.brackets import Bracket
from tacit.accounting.numerics import ROUND
from tacit.accounting.pld.invert import invert
from tacit.accounting.pld.loss_laws import Discrete, Law, Normal, Sampled, Shifted
from tacit.accounting.pld.pairs import Direction


class OneRelease:
    """delta(epsilon) = P(l > epsilon) - exp(epsilon) Q(l > epsilon) of a single law.

    For additive noise the losses above epsilon are the outputs above some x, and the difference is
    a sum of three tails of the noise. For a plain Gaussian it is Balle & Wang 2018
    (arXiv:1805.06530), Theorem 8.
    """

    def __init__(self, law: Law) -> None:
        if isinstance(law, Shifted):
            law = Sampled(Normal(1 / law.mu), 1.0, 1, 0)
        self.law = law
        self.largest_loss = law.largest_loss

    def delta(self, epsilon: float) -> Bracket:
        """Certified bounds: what is left open is rounding."""
        if epsilon >= self.largest_loss:
            return Bracket(0.0, 0.0)
        if isinstance(self.law, Discrete):
            return self._discrete(self.law, epsilon)
        return self._tails(self.law, epsilon)

    @staticmethod
    def _discrete(law: Discrete, epsilon: float) -> Bracket:
        loss, p = np.array(law.losses), np.array(law.p)
        value = float(p @ -np.expm1(np.minimum(epsilon - loss, 0.0)))
        high = loss > epsilon * (1 - 8 * ROUND)
        error = 8 * ROUND * float(p[high] @ (1 + np.abs(loss[high]) + epsilon))
        return Bracket.of_delta(value - error, value + error)

    @staticmethod
    def _tails(law: Sampled, epsilon: float) -> Bracket:
        x = float(law.where_loss(np.array(epsilon)))
        p, q = law.a * law.rate, law.b * law.rate
        # With F the mass above, delta = p F(x - 1) + ((1 - p) - exp(epsilon) (1 - q)) F(x)
        # - exp(epsilon) q F(x + 1). It is largest at x, so rounding x matters to second order only.
        middle = (q - p) * math.exp(-epsilon) + math.expm1(-epsilon) * (1 - q)
        sizes = [(p, 0.0, x - 1), (middle, epsilon, x), (-q, epsilon, x + 1)]
        terms = [
            (
                math.copysign(1.0, size),
                math.log(abs(size)) + shift,
                float(law.noise.log_above(np.array(at))),
            )
            for size, shift, at in sizes
            if size and at < math.inf
        ]
        if not terms:
            return Bracket(0.0, 0.0)
        top = max(log_size + log_tail for _, log_size, log_tail in terms)
        scaled = [(sign * math.exp(a + b - top), abs(a) + abs(b)) for sign, a, b in terms]
        value = math.fsum(term for term, _ in scaled)
        error = math.fsum(32 * ROUND * (2 + size + epsilon) * abs(term) for term, size in scaled)
        scale = math.exp(min(top, 0.0))
        slack = 0.0 if isinstance(law.noise, Normal) else 8 * ROUND * (1 + epsilon)
        lower, upper = scale * (value - error), scale * (value + error) + slack
        return Bracket.of_delta(lower, max(upper, 5e-324))


class Unsampled:
    """An upper bound of any composition: its noise as if nothing had been sampled.

    Sampling mixes a pair with equal laws, which lowers every divergence (joint convexity), so all
    Gaussian noise is at most one plain Gaussian; any other loss is at most its largest.
    """

    def __init__(self, direction: Direction) -> None:
        squared, rest = 0.0, 0.0
        for law, count in direction.parts:
            if isinstance(law, Shifted):
                squared += count * law.mu**2
            elif isinstance(law, Sampled) and isinstance(law.noise, Normal):
                squared += count * ((law.a + law.b) / law.noise.sigma) ** 2
            else:
                rest += count * law.largest_loss
        self.rest = rest * (1 + 1e-14)
        self.noise = OneRelease(Shifted(math.sqrt(squared))) if squared else None

    def epsilon(self, delta: float) -> float:
        """Upper bound of epsilon."""
        if self.noise is None:
            return self.rest
        return self.rest + invert(self.noise, delta, guess=1.0, ceiling=math.inf).upper

    def delta(self, epsilon: float) -> float:
        """Upper bound of delta."""
        if epsilon < self.rest:
            return 1.0
        return self.noise.delta(epsilon - self.rest).upper if self.noise else 0.0
