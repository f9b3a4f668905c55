"""Canary sequences and their exposure (Carlini et al. 2019, "The Secret Sharer", arXiv:1802.08232).

A canary is a sentence with a made-up secret number, added to the training texts. A model that has
learned it by heart finds it more probable than sentences with other numbers. With `references`
sentences of the same form that were not trained on, and the rank of the canary among them by its
loss (1 is the most probable), the exposure is

    log2(references + 1) - log2(rank)          (section 4.2, definition 4).

If the model has not learned the canary, its rank is uniform, and the exposure is close to an
exponential variable with mean 1 / ln 2 = 1.44 bits. So the sum over independent canaries has a
gamma distribution, from which the p-value of "nothing was learned" follows.

Secrets are made up by us and are no person's: their exposure may be published.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import gamma

CHANCE = 1 / math.log(2)
"""Mean exposure of canaries that were not learned, in bits."""
_FORM = "the secret number of guest {name} is {digits}"
_NAMES = ("alpha", "bravo", "delta", "gamma", "kilo", "lima", "omega", "sierra", "tango", "zulu")


class Canary(NamedTuple):
    """A sentence with a secret, and sentences of the same form that are not trained on."""

    text: str
    references: tuple[str, ...]


class Exposures(NamedTuple):
    """Exposures of several canaries, in bits, and the p-value of "nothing was learned"."""

    bits: tuple[float, ...]
    p_value: float

    @property
    def mean(self) -> float:
        """Mean exposure; about `CHANCE` if nothing was learned."""
        return float(np.mean(self.bits))

    @property
    def error(self) -> float:
        """Standard deviation of the mean if nothing was learned."""
        return CHANCE / math.sqrt(len(self.bits))


def make_canaries(count: int, *, digits: int, references: int, seed: int) -> list[Canary]:
    """Return canaries with different secrets, and their references; equal for equal seeds."""
    rng = np.random.default_rng(seed)
    if references + 1 > 10**digits:
        raise ValueError(
            f"canaries.references must be below 10^digits, got {references} and {digits} digits."
        )

    def sentences(number: int) -> tuple[str, ...]:
        name = f"{_NAMES[number % len(_NAMES)]} {number}"
        drawn: dict[str, None] = {}
        while len(drawn) <= references:
            drawn[" ".join(map(str, rng.integers(0, 10, digits)))] = None
        return tuple(_FORM.format(name=name, digits=secret) for secret in drawn)

    made = [sentences(number) for number in range(count)]
    return [Canary(first, tuple(others)) for first, *others in made]


def exposures(
    canaries: Sequence[Canary], losses: Callable[[Sequence[str]], Sequence[float]]
) -> Exposures:
    """Return the exposure of each canary by the losses that a model gives to sentences.

    Ties count as half, so a model that finds everything equally probable is at chance. A loss that
    is not a number counts as infinite.

    >>> known = Canary("a", tuple("bcdefgh"))
    >>> exposures([known], lambda texts: [ord(text) for text in texts]).bits
    (3.0,)
    """
    bits = []
    for canary in canaries:
        found = np.nan_to_num(losses([canary.text, *canary.references]), nan=np.inf, posinf=np.inf)
        own, *others = found.tolist()
        below = sum(other < own for other in others) + sum(other == own for other in others) / 2
        bits.append(math.log2(len(others) + 1) - math.log2(below + 1))
    total = math.log(2) * sum(bits)  # nats: a sum of exponential variables with mean 1
    return Exposures(tuple(bits), float(gamma.sf(total, len(bits))) if bits else 1.0)
