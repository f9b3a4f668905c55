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
from tacit.auditing.p_values import Finding, deterministic

KEY_PARTS = 8  # parts of a key that are changed one at a time
_KEY_BYTES = 16  # least entropy of a key


def key_findings(draw: Callable[[], Floats], *, part: str) -> list[Finding]:
    """Test calls of `draw`, each of which releases some noise under a fresh key."""
    drawn, is_fresh = [], True
    for _ in range(2):
        with same_start(), seen_entropy() as entropy:
            drawn.append(draw())
        is_fresh &= bool(entropy)
    changed = []
    for place in (None, *range(KEY_PARTS)):
        with same_start(), fixed_entropy(place):
            changed.append(draw())
    checks = {
        "two releases share no noise": not np.array_equal(*drawn),
        "the key comes from the operating system": is_fresh,
        "every part of the key changes the noise": not any(
            np.array_equal(changed[0], one) for one in changed[1:]
        ),
    }
    return [Finding(part, name, deterministic(is_good)) for name, is_good in checks.items()]


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
def seen_entropy() -> Iterator[set[str]]:
    """Collect the numbers that the operating system gives while the block runs, as hexadecimals.

    Numbers that are too short for a key are left out.
    """
    given: set[str] = set()
    genuine = os.urandom

    def watched(size: int) -> bytes:
        found = genuine(size)
        if size >= _KEY_BYTES:
            given.add(found.hex())
        return found

    with _urandom(watched):
        yield given


@contextmanager
def fixed_entropy(changed: int | None) -> Iterator[None]:
    """Let the operating system give known bytes; those of one part of a key can be changed."""

    def known(size: int) -> bytes:
        parts = [place * KEY_PARTS // size for place in range(size)]
        return bytes((7 * i + 3) % 251 ^ (255 * (parts[i] == changed)) for i in range(size))

    with _urandom(known):
        yield


@contextmanager
def _urandom(given: Callable[[int], bytes]) -> Iterator[None]:
    genuine = os.urandom
    os.urandom = given
    try:
        yield
    finally:
        os.urandom = genuine
