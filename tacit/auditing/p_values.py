"""Results of several tests of one mechanism, judged together at one family-wise error.

A test gives a p-value: if the mechanism is as billed, the p-value is below x with probability at
most x. An audit runs many tests, so single p-values are not compared with 5 %: Holm's procedure
(Holm 1979) flags tests such that the chance of any false alarm in the whole audit is at most
1 - confidence, however the tests depend on each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import special, stats

from tacit._arrays import Floats
from tacit._check import in_closed_unit, in_open_unit

IMPOSSIBLE = 0.0
"""P-value of an outcome that a mechanism as billed cannot have."""


@dataclass(frozen=True)
class Finding:
    """Result of one test: the part of the mechanism that was tested, what was found, its p-value.

    `part` is "noise", "draws", "post-processing", "sensitivity", "keys", "bill" or the name of a
    mechanism.
    """

    part: str
    name: str
    p_value: float

    def __post_init__(self) -> None:
        # A NaN would never be flagged, so it must not get this far.
        in_closed_unit(p_value=self.p_value)


@dataclass(frozen=True, kw_only=True)
class MechanismAudit:
    """All findings of an audit of one mechanism, what was not tested, and the common confidence."""

    findings: tuple[Finding, ...]
    not_tested: tuple[str, ...] = ()
    confidence: float = 0.95

    @property
    def flagged(self) -> tuple[Finding, ...]:
        """Findings that show a fault; all false with probability at most 1 - `confidence`."""
        return holm(self.findings, confidence=self.confidence)

    @property
    def passes(self) -> bool:
        """Whether no test shows a fault."""
        return not self.flagged

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return plain JSON values: what was tested, what was not, and the family-wise error."""
        flagged = set(self.flagged)
        return {
            "tested": [{**asdict(one), "is_flagged": one in flagged} for one in self.findings],
            "not_tested": list(self.not_tested),
            "family_wise_error": round(1 - self.confidence, 12),
            "passes": self.passes,
        }


def joined(audits: Iterable[MechanismAudit], *, confidence: float = 0.95) -> MechanismAudit:
    """Return one audit with the findings of all `audits`, judged together at `confidence`."""
    listed = list(audits)
    findings = tuple(finding for one in listed for finding in one.findings)
    skipped = tuple(dict.fromkeys(what for one in listed for what in one.not_tested))
    return MechanismAudit(findings=findings, not_tested=skipped, confidence=confidence)


def holm(findings: Sequence[Finding], *, confidence: float) -> tuple[Finding, ...]:
    """Return the findings that Holm's procedure rejects at family-wise error 1 - `confidence`.

    >>> two = [Finding("noise", "law", 0.03), Finding("noise", "variance", 0.001)]
    >>> [finding.name for finding in holm(two, confidence=0.95)]
    ['variance', 'law']
    """
    error = 1 - in_open_unit(confidence=confidence)
    flagged = []
    for number, finding in enumerate(sorted(findings, key=lambda finding: finding.p_value)):
        if finding.p_value > error / (len(findings) - number):
            break
        flagged.append(finding)
    return tuple(flagged)


def smallest(p_values: Iterable[float]) -> float:
    """Return one p-value for several tests: the smallest times their number (Bonferroni)."""
    found = np.atleast_1d(np.asarray(list(p_values), np.float64))
    return float(min(1.0, len(found) * found.min())) if len(found) else 1.0


def two_sided(lower: float, upper: float) -> float:
    """Return the p-value of a test with the given lower and upper tail probabilities."""
    return float(min(1.0, 2 * min(lower, upper)))


def normal_p(z: float) -> float:
    """Return the two-sided p-value of a standard normal value."""
    return float(min(1.0, 2 * special.ndtr(-abs(z))))


def deterministic(is_as_billed: bool) -> float:
    """Return the p-value of a check that a mechanism as billed passes always."""
    return 1.0 if is_as_billed else IMPOSSIBLE


def checks(part: str, tests: Mapping[str, bool]) -> list[Finding]:
    """Return the findings of checks that a mechanism as billed passes always, by their names."""
    return [Finding(part, name, deterministic(bool(good))) for name, good in tests.items()]


def dispersion_p(counts: Floats, trials: float, rate: float) -> float:
    """Return the p-value of the variance of binomial `counts`, too even or too uneven.

    The sum of squared standardized counts is compared with the scaled chi-squared distribution that
    has its exact mean and variance (Satterthwaite's approximation).
    """
    variance = trials * rate * (1 - rate)
    if variance <= 0 or len(counts) < 2:
        return 1.0
    total = float(((counts - trials * rate) ** 2).sum() / variance)
    spread = 2 + (1 - 6 * rate * (1 - rate)) / variance  # variance of one squared count
    scale = spread / 2
    freedom = len(counts) / scale
    law = stats.chi2(freedom, scale=scale)
    return two_sided(float(law.cdf(total)), float(law.sf(total)))
