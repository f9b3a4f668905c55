"""Auditing: attack what was trained; a lower bound on epsilon that must stay under the bill."""

from tacit.auditing.bill import BillTest, noise_bound, refute_event
from tacit.auditing.bounds import (
    AuditBound,
    gaussian_fit,
    gaussian_threshold_test,
    one_run,
    one_run_gaussian,
    threshold_test,
)
from tacit.auditing.canaries import (
    GradientCanaries,
    InputCanaries,
    flip_coins,
    mislabeled,
    random_inputs,
)
from tacit.auditing.guesses import plan_guesses

__all__ = [
    "AuditBound",
    "BillTest",
    "GradientCanaries",
    "InputCanaries",
    "flip_coins",
    "gaussian_fit",
    "gaussian_threshold_test",
    "mislabeled",
    "noise_bound",
    "one_run",
    "one_run_gaussian",
    "plan_guesses",
    "random_inputs",
    "refute_event",
    "threshold_test",
]
