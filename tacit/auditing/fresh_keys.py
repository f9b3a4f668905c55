"""Tests of keys: where the random numbers of a release come from, and that no two releases share.

A key must come from the operating system. Generators that the program shares (those of Python,
numpy and torch) are set to one state before each run, so that a key taken from them repeats.
"""

import os
import random as python_random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from tacit._arrays import Floats
from tacit.auditing.p_values import Finding, checks, smallest

_PARTS = 8  # parts of a key that are changed one at a time


def key_findings(
    draw: Callable[[], Floats],
    *,
    part: str,
    shared: Callable[[Floats, Floats], float] = lambda a, b: float(not np.array_equal(a, b)),
) -> list[Finding]:
    """Test calls of `draw`, each of which releases some noise under a fresh key.

    `shared` gives the p-value of the hypothesis that two calls have no noise in common; default 0
    if they are equal.
    """
    drawn, known = [], []
    for _ in range(2):
        with same_start():
            drawn.append(draw())
    for place in (None, None, *range(_PARTS)):
        with same_start(), fixed_entropy(place):
            known.append(draw())
    is_known = np.array_equal(known[0], known[1])
    changed = smallest(shared(known[0], one) for one in known[2:])
    return [
        Finding(part, "two runs share no noise", shared(*drawn)),
        *checks(part, {"the key comes from the operating system": is_known}),
        Finding(part, "every part of the key changes the noise", changed),
    ]


@contextmanager
def same_start() -> Iterator[None]:
    """Start the generators that programs share from one state; restore them afterwards."""
    python, legacy = python_random.getstate(), np.random.get_state()  # noqa: NPY002  # programs use it
    try:
        with ExitStack() as stack:
            if "torch" in sys.modules:
                import torch

                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.default_generator.manual_seed(0)
            python_random.seed(0)
            np.random.seed(0)  # noqa: NPY002  # the generator that programs share
            yield
    finally:
        python_random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002


@contextmanager
def fixed_entropy(changed: int | None) -> Iterator[None]:
    """Let the operating system give known bytes; those of one part of a key can be changed."""

    def known(size: int) -> bytes:
        parts = [place * _PARTS // size for place in range(size)]
        return bytes((7 * i + 3) % 251 ^ (255 * (parts[i] == changed)) for i in range(size))

    genuine, os.urandom = os.urandom, known
    try:
        yield
    finally:
        os.urandom = genuine
