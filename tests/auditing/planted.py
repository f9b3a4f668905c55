"""Deliberately broken variants that an audit must flag, each beside its correct twin.

A case is a function of `is_broken`. It returns what is billed and an attack: given which trials
hold the canary, it runs the mechanism once for each and scores what came out, higher for members.
Trials are independent. Each fault was seen in released code or in a paper; none is in tacit.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit import pate
from tacit.events import Event, Gaussian, Laplace, PoissonSampled, Repeated
from tacit.mechanisms import GaussianMechanism, LaplaceMechanism

Flags = NDArray[np.bool_]
Rng = np.random.Generator
SIGMA = 1.0  # noise multiplier of most cases
CLIP = 1.0


class Case(NamedTuple):
    bill: Event
    attack: Callable[[Flags, Rng], NDArray[np.float64]]
    n_trials: int = 3000
    epsilons: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)  # of the bill


def clip(gradients, norm):
    """Rows of `gradients` with an L2 norm of at most CLIP, where `norm` is what is taken for it."""
    return gradients * np.minimum(1.0, CLIP / np.maximum(norm, 1e-12))[..., None]


def noise_at_half_scale(is_broken):
    mechanism = GaussianMechanism(SIGMA / 2 if is_broken else SIGMA, l2_sensitivity=1.0)
    return Case(Gaussian(SIGMA), lambda inside, rng: mechanism.release(inside.astype(float), rng))


def divided_by_the_drawn_batch_size(is_broken):
    """The canary has a zero gradient; only the drawn batch size leaks, as it scales the noise."""

    def attack(inside, rng):
        noise = rng.normal(0, SIGMA * CLIP, (len(inside), 400))
        divisor = 4 + inside if is_broken else np.full(len(inside), 4)
        return -np.linalg.norm(noise / divisor[:, None], axis=1)

    return Case(Gaussian(SIGMA), attack, n_trials=600)


def clipping_after_averaging(is_broken):
    """Noise for one clipped record among ten, but one record can turn the whole mean."""

    def attack(inside, rng):
        gradients = np.zeros((len(inside), 10, 2))
        gradients[:, 1:, 1] = CLIP  # nine ordinary records
        gradients[inside, 0, 0] = 1000.0  # the canary
        if is_broken:
            mean = gradients.mean(axis=1)
            mean = clip(mean, np.linalg.norm(mean, axis=-1))
        else:
            mean = clip(gradients, np.linalg.norm(gradients, axis=-1)).mean(axis=1)
        return mean[:, 0] + rng.normal(0, SIGMA * CLIP / 10, len(inside))

    return Case(Gaussian(SIGMA), attack)


def clip_ignored_on_the_bias(is_broken):
    def attack(inside, rng):
        gradient = inside[:, None] * np.array([0.0, 50.0])  # (weight, bias)
        seen = gradient[:, :1] if is_broken else gradient
        clipped = clip(gradient, np.linalg.norm(seen, axis=-1))
        return clipped[:, 1] + rng.normal(0, SIGMA * CLIP, len(inside))

    return Case(Gaussian(SIGMA), attack)


def no_composition_over_steps(is_broken):
    steps, sigma = 16, 4.0
    bill = Gaussian(sigma) if is_broken else Repeated(Gaussian(sigma), steps)

    def attack(inside, rng):
        return (inside + rng.normal(0, sigma, (steps, len(inside)))).mean(axis=0)

    return Case(bill, attack)


def tied_weights_clipped_twice(is_broken):
    """The weight is used in two places; each place's gradient is clipped by itself, then added."""

    def attack(inside, rng):
        first = second = inside[:, None] * np.array([30.0])
        if is_broken:
            total = clip(first, abs(first[:, 0])) + clip(second, abs(second[:, 0]))
        else:
            total = clip(first + second, abs(first + second)[:, 0])
        return total[:, 0] + rng.normal(0, SIGMA * CLIP, len(inside))

    return Case(Gaussian(SIGMA), attack)


def same_noise_seed_every_step(is_broken):
    """Two steps at rate 1/2: equal noise cancels in their difference."""

    def attack(inside, rng):
        drawn = inside & (rng.random((2, len(inside))) < 0.5)
        noise = rng.normal(0, SIGMA, (2, len(inside)))
        first, second = drawn + (noise[[0, 0]] if is_broken else noise)
        return abs(first - second) if is_broken else first + second

    return Case(Repeated(PoissonSampled(0.5, Gaussian(SIGMA)), 2), attack)


def laplace_scale_inverted(is_broken):
    """A count of sensitivity 2 at epsilon = ln 3 needs scale 2 / epsilon, not epsilon / 2."""
    epsilon = math.log(3)

    def attack(inside, rng):
        if is_broken:
            return 2 * inside + rng.laplace(0, epsilon / 2, len(inside))
        mechanism = LaplaceMechanism(1 / epsilon, l1_sensitivity=2.0)
        return np.array([mechanism.release(2.0 * one, rng) for one in inside])

    return Case(Laplace(1 / epsilon), attack)


def gram_diagonal_without_noise(is_broken):
    def attack(inside, rng):
        row = np.array([0.8, 0.6])  # a record of norm 1: its outer product has norm 1
        gram = np.eye(2) * 7.0 + inside[:, None, None] * np.outer(row, row)
        noise = rng.normal(0, SIGMA, gram.shape)
        if is_broken:
            noise[:, [0, 1], [0, 1]] = 0.0
        return np.trace(gram + noise, axis1=1, axis2=2)

    return Case(Gaussian(SIGMA), attack)


def bounds_taken_from_the_data(is_broken):
    """A mean with Laplace noise scaled to the range: an outlier sets the range."""

    def attack(inside, rng):
        values = np.column_stack([rng.random((len(inside), 9)), np.where(inside, 1e3, 0.5)])
        if is_broken:
            low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
        else:
            low, high = np.zeros((len(inside), 1)), np.ones((len(inside), 1))
        mean = values.clip(low, high).mean(axis=1)
        return abs(mean + rng.laplace(0, (high - low)[:, 0] / 10))

    return Case(Laplace(1.0), attack)


def noise_per_rank_averaged_wrongly(is_broken):
    """Eight ranks add noise: variances add, so each owes 1 / sqrt(8) of the scale, not 1 / 8."""
    ranks = 8
    share = 1 / ranks if is_broken else 1 / math.sqrt(ranks)

    def attack(inside, rng):
        return inside + rng.normal(0, SIGMA * share, (ranks, len(inside))).sum(axis=0)

    return Case(Gaussian(SIGMA), attack)


def vote_gap_used_without_noise(is_broken):
    """PATE answers where the vote is clear; if the check has no noise, one vote decides it."""
    aggregator = pate.ConfidentGNMax(threshold=200, sigma_threshold=20, sigma_answer=20)

    def attack(inside, rng):
        votes = np.column_stack([199 + inside, 51 - inside])
        if is_broken:
            answered = votes.max(axis=1) >= 200
        else:
            answered = aggregator.answer(votes, rng=rng, block=len(votes)) != pate.NO_ANSWER
        return answered.astype(float)

    return Case(aggregator.event(1), attack)


def shuffled_batches_charged_as_poisson(is_broken):
    """All other records push down by 1; the canary's batch alone stands out (Chua et al. 2024)."""
    steps, sigma = 10_000, 0.4

    def largest_of(count, rng):
        """Largest of `count` noises, by its inverse distribution function."""
        from scipy.special import ndtri

        return sigma * ndtri(rng.random(len(count)) ** (1 / count))

    def attack(inside, rng):
        if is_broken:  # one batch holds the canary's place: 0 without it, +1 with it
            others = -1 + largest_of(np.full(len(inside), steps - 1), rng)
            return np.maximum(others, inside + rng.normal(0, sigma, len(inside)))
        pushed = rng.poisson(1.0, (len(inside), steps)).astype(np.float32)
        drawn = rng.random((len(inside), steps), np.float32) < inside[:, None] / steps
        noise = rng.standard_normal((len(inside), steps), np.float32)
        return (drawn - pushed + np.float32(sigma) * noise).max(axis=1)

    bill = Repeated(PoissonSampled(1 / steps, Gaussian(sigma)), steps)
    return Case(bill, attack, n_trials=10_000 if is_broken else 600, epsilons=(0.0, 2.0, 4.0))


CASES = {
    case.__name__: case
    for case in (
        noise_at_half_scale,
        divided_by_the_drawn_batch_size,
        clipping_after_averaging,
        clip_ignored_on_the_bias,
        no_composition_over_steps,
        tied_weights_clipped_twice,
        same_noise_seed_every_step,
        laplace_scale_inverted,
        gram_diagonal_without_noise,
        bounds_taken_from_the_data,
        noise_per_rank_averaged_wrongly,
        vote_gap_used_without_noise,
        shuffled_batches_charged_as_poisson,
    )
}
