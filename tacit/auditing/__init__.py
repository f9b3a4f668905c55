"""Auditing: attack what was trained; a lower bound on epsilon that must stay under the bill."""

from tacit.auditing.bounds import (
    AuditBound,
    gaussian_fit,
    one_run,
    one_run_gaussian,
    threshold_test,
)

__all__ = ["AuditBound", "gaussian_fit", "one_run", "one_run_gaussian", "threshold_test"]
