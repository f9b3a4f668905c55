"""Certified reference values of Poisson-sampled Gaussian runs, and some in 40-digit arithmetic."""

import json
import math
import os
from pathlib import Path

import pytest

from tacit.accounting.brackets import Bracket
from tacit.accounting.pld import PLD
from tacit.events import Gaussian, PoissonSampled, Relation, Repeated

_BESIDE = Path(__file__).resolve().parents[3] / "shared" / "reference"
_FILE = Path(os.environ.get("TACIT_REFERENCE", _BESIDE)) / "accounting.json"
CASES = json.loads(_FILE.read_text(encoding="utf-8"))["cases"] if _FILE.is_file() else []
needs_reference = pytest.mark.skipif(
    not CASES, reason="reference values not found: set TACIT_REFERENCE to their folder"
)


def run(case):
    return Repeated(PoissonSampled(case["q"], Gaussian(case["sigma"])), case["T"])


@needs_reference
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_reference_meets_our_bracket(case):
    ours = PLD().bracket(run(case), delta=case["delta"])
    assert ours.meets(Bracket(case["certified"]["lower"], case["certified"]["upper"]))
    assert ours.upper <= case["certified"]["upper"] * (1 + 1e-3) + 1e-4
    assert ours.width <= 1e-4 * ours.upper


@needs_reference
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_reference_delta_meets_our_bracket(case):
    upper = PLD().delta_bracket(run(case), epsilon=case["certified"]["upper"])
    lower = PLD().delta_bracket(run(case), epsilon=case["certified"]["lower"])
    assert upper.lower <= case["delta"] * (1 + 1e-9)
    assert lower.upper >= case["delta"] * (1 - 1e-9)


# order and window of the mpmath integral: any give the same value, these give it quickly
CHECKS = [
    (0.01, 4.0, 10_000, 1e-5, Relation.ADD_REMOVE, 12.0, 9.0),
    (0.08206015372057715, 1.0177819726879924, 16, 3.5e-12, Relation.REPLACE_ONE, 3.0, 40.0),
    (0.2, 2.0, 50, 1e-3, Relation.ADD_REMOVE, 3.0, 40.0),
    (0.25, 5.0, 1000, 1e-10, Relation.REPLACE_ONE, 1.5, 90.0),
    (0.004266666666666667, 1.1, 14062, 1e-5, Relation.ADD_REMOVE, 4.0, 30.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "relation", "order", "window"), CHECKS)
def test_forty_digits_agree(q, sigma, steps, delta, relation, order, window):
    event = Repeated(PoissonSampled(q, Gaussian(sigma)), steps)
    bracket = PLD().bracket(event, delta=delta, relation=relation)
    replaced = relation is Relation.REPLACE_ONE
    assert _mpmath_delta(q, sigma, steps, bracket.upper, order, window, replaced) <= delta
    assert _mpmath_delta(q, sigma, steps, bracket.lower, order, window, replaced) >= delta


def _mpmath_delta(q, sigma, steps, epsilon, order, window, replaced):
    """delta(epsilon) of the removed (or replaced) record: the contour integral, nothing cut."""
    from mpmath import mp, mpf

    with mp.workdps(40):
        q, sigma, epsilon, order = (mpf(value) for value in (q, sigma, epsilon, order))
        spacing = mpf(min(0.12, 0.12 * float(sigma)))
        grid = [-16 + spacing * k for k in range(math.ceil(48 / spacing))]

        def log_ratio(y):
            return mp.log(1 - q + q * mp.e ** (y / sigma - 1 / (2 * sigma**2)))

        ups = [log_ratio(y) for y in grid]
        losses = [u - (log_ratio(-y) if replaced else 0) for u, y in zip(ups, grid, strict=True)]
        weights = [
            spacing * mp.e ** (-y * y / 2 + u + order * loss) / mp.sqrt(2 * mp.pi)
            for y, u, loss in zip(grid, ups, losses, strict=True)
        ]
        step = 2 * mp.pi / mpf(window)
        turns = [mp.expj(step * loss) for loss in losses]
        total, node, mass = mpf(0), 0, mp.fsum(weights)
        while True:
            z = mp.mpc(order, step * node)
            moment = mp.fsum(weights)
            term = moment**steps * mp.e ** (-z * epsilon) / (z * (z + 1))
            total += term.real / (2 if node == 0 else 1)
            if abs(moment / mass) ** steps < mpf(10) ** -32:
                return total * step / mp.pi
            node += 1
            weights = [w * turn for w, turn in zip(weights, turns, strict=True)]
