"""Parametrized tests of which only some cases run in every run of the tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_fast(cases: Iterable[Any], every: int) -> list[Any]:
    """Return all cases, marked slow except one of `every`."""
    slow = pytest.mark.slow
    return [
        case if i % every == 0 else pytest.param(case, marks=slow) for i, case in enumerate(cases)
    ]
