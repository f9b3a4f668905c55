"""Choosing the frequency oracle with the least variance for a number of options and an epsilon."""

from collections.abc import Iterable

from tacit._check import non_negative
from tacit.local.frequencies import FrequencyOracle
from tacit.local.hadamard import HadamardResponse
from tacit.local.local_hashing import LocalHashing
from tacit.local.randomized_response import RandomizedResponse
from tacit.local.unary import OptimizedUnary

ORACLES: tuple[type[FrequencyOracle], ...] = (
    RandomizedResponse,
    OptimizedUnary,
    LocalHashing,
    HadamardResponse,
)
"""All frequency oracles that send one report without memory."""


def choose_oracle(
    n_options: int,
    epsilon: float,
    *,
    tolerance: float = 0.03,
    among: Iterable[type[FrequencyOracle]] = ORACLES,
) -> FrequencyOracle:
    """Return the oracle with the shortest reports among those of nearly the least variance.

    An oracle estimates how frequent each option is. `n_options` and `epsilon` are public, so the
    choice costs no privacy.

    Parameters
    ----------
    tolerance
        Relative excess over the least mean variance that is accepted for the sake of shorter
        reports.

    Examples
    --------
    >>> choose_oracle(4, 2.0).name
    'randomized response'
    >>> choose_oracle(1000, 1.0).name
    'optimal local hashing'
    """
    tolerance = non_negative(tolerance=tolerance)
    found = [kind(epsilon=epsilon, n_options=n_options) for kind in among]
    least = min(oracle.mean_variance for oracle in found)
    good = [oracle for oracle in found if oracle.mean_variance <= (1 + tolerance) * least]
    return min(good, key=lambda oracle: (oracle.report_bits, oracle.mean_variance))
