"""The closed form of the price of shuffled reports, to compare with the numerical bound."""

import math

from tacit._check import in_open_unit, positive, whole
from tacit.accounting.shuffle import _checked_clones


def shuffled_closed_form(
    local_epsilon: float, n_reports: int, *, delta: float, clones: float | None = None
) -> float:
    """Return the published closed-form bound on epsilon of `n_reports` shuffled reports at `delta`.

    With e = exp(local_epsilon), n = `n_reports` and gamma = `clones`, the bound is
    log(1 + (e - 1) / (e + 1) (8 sqrt(log(4 / delta) / (gamma n)) + 8 / (gamma n))). It holds if
    gamma n >= 16 log(2 / delta); otherwise return `local_epsilon`. With gamma = 1/e it is Theorem
    3.1 of Feldman, McMillan & Talwar 2021, with gamma = 2 / (e + 1) the bound of their 2023 paper.
    """
    local_epsilon, delta = positive(local_epsilon=local_epsilon), in_open_unit(delta=delta)
    expected = _checked_clones(local_epsilon, clones) * whole(n_reports=n_reports, least=1)
    if expected < 16 * math.log(2 / delta):
        return local_epsilon
    sum_of_terms = 8 * math.sqrt(math.log(4 / delta) / expected) + 8 / expected
    found = math.log1p(math.tanh(local_epsilon / 2) * sum_of_terms)
    return min(found, local_epsilon)
