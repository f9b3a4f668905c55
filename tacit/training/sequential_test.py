"""Do two samplers of random vectors have the same law? Wald's sequential test on pairs of draws.

Each pair holds one draw of each sampler, independent of each other. If the laws are equal, the two
draws of a pair are exchangeable, so their difference is as likely to point to one side of a given
direction as to the other. The direction comes from the pairs before. So the number of pairs that
agree with the direction is that of fair coins, whatever the law is: heavy tails, correlated
entries and draws with few values included.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Sampler = Callable[[], Tensor]

FALSE_ALARM = 1e-9
"""Probability, at most, that equal laws are taken for different ones."""
_AGREEMENT = 0.9  # probability that a pair agrees, which the fair coin is tested against
_PASS = 0.001  # likelihood ratio below which the laws are taken to be equal
_WARM_UP = 6  # pairs that only give a direction
_LEVEL = 20  # pairs of as many draws: laws that are not told apart soon get more
_MOST = 100  # pairs after which laws that were not told apart are taken to be equal


def differ_in_law(
    first: Sampler, second: Sampler, rng: np.random.Generator, *, slack: float | Tensor = 0.0
) -> bool:
    """Return whether two samplers have different laws; wrongly with probability 10^-9 at most.

    The likelihood ratio of "nine pairs in ten agree" to "one pair in two agrees" is a martingale of
    mean one if the laws are equal, so that it ever exceeds 10^9 with probability 10^-9 (Ville 1939;
    Wald 1945, Sequential tests of statistical hypotheses). Means, spreads and the frequency of
    numbers that are not finite are compared. Entries closer than `slack` count as equal. About 25
    draws of each are made if the laws are equal, 70 or more before they are found to differ.

    >>> rng = np.random.default_rng(0)
    >>> def normal():
    ...     return torch.from_numpy(rng.normal(size=8))
    >>> differ_in_law(normal, normal, rng)
    False
    >>> differ_in_law(normal, lambda: normal() + 3, rng)
    True
    """
    center = torch.zeros(())
    total = squares = torch.zeros(3, 1)
    log_ratio = 0.0
    for pair in range(_MOST):
        draws = 1 + (pair // _LEVEL) ** 2
        drawn = [_draw(first, second, rng) for _ in range(draws)]
        difference = torch.stack([_difference(a, b, center, slack) for a, b in drawn]).sum(0)
        if pair >= _WARM_UP:
            agrees = float((_direction(total, squares) * difference).sum()) > 0
            log_ratio += math.log(2 * (_AGREEMENT if agrees else 1 - _AGREEMENT))
            if log_ratio > -math.log(FALSE_ALARM):
                return True
            if log_ratio < math.log(_PASS):
                return False
        a, b = map(_finite, drawn[0])
        center = center + ((a + b) / 2 - center) / (pair + 1)
        total, squares = total + difference, squares + difference.square() / draws
    return False


def _draw(first: Sampler, second: Sampler, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw from both, in random order: state that moves from call to call meets both alike."""
    if rng.random() < 0.5:
        a = first()
        return a, second()
    b = second()
    return first(), b


def _direction(total: Tensor, squares: Tensor) -> Tensor:
    """Return the direction, (3, entries), in which the pairs so far differ the most.

    Entries are taken in units of their spread. What all entries have in common is less noisy than
    what each has by itself, so it gets as much weight as all entries together.
    """
    weight = torch.where(squares > 0, squares, torch.inf).rsqrt()  # none where all was equal
    own = total * weight
    common = own.mean(1, keepdim=True) * own.shape[1] ** 0.5
    return (own + common) * weight


def _difference(a: Tensor, b: Tensor, center: Tensor, slack: float | Tensor) -> Tensor:
    """Return the differences of values, of distances from `center`, and of finiteness."""
    is_apart = (_finite(a) - _finite(b)).abs() > slack
    values = (_finite(a) - _finite(b)) * is_apart
    spreads = ((_finite(a) - center).abs() - (_finite(b) - center).abs()) * is_apart
    return torch.stack([values, spreads, 1.0 * a.isfinite() - 1.0 * b.isfinite()]).flatten(1)


def _finite(values: Tensor) -> Tensor:
    return values.double().nan_to_num(0.0, 0.0, 0.0)
