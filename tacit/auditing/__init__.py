"""Auditing: attack what was trained; a lower bound on epsilon that must stay under the bill."""

from tacit.auditing.canaries import (
    GradientCanaries,
    InputCanaries,
    flip_coins,
    mislabeled,
    random_inputs,
)
from tacit.auditing.event_test import BillTest, noise_bound, refute_event
from tacit.auditing.guesses import plan_guesses
from tacit.auditing.inversion import inversion_figure, invert, likeness
from tacit.auditing.lira import (
    ROC,
    Shadows,
    best_tpr,
    lira,
    roc,
    roc_figure,
    train_shadows,
)
from tacit.auditing.one_run import (
    AuditBound,
    gaussian_fit,
    gaussian_threshold_test,
    one_run,
    one_run_gaussian,
    threshold_test,
)
from tacit.auditing.scores import calibrated, inner_products, logit_confidence, minus_loss

__all__ = [
    "ROC",
    "AuditBound",
    "BillTest",
    "GradientCanaries",
    "InputCanaries",
    "Shadows",
    "best_tpr",
    "calibrated",
    "flip_coins",
    "gaussian_fit",
    "gaussian_threshold_test",
    "inner_products",
    "inversion_figure",
    "invert",
    "likeness",
    "lira",
    "logit_confidence",
    "minus_loss",
    "mislabeled",
    "noise_bound",
    "one_run",
    "one_run_gaussian",
    "plan_guesses",
    "random_inputs",
    "refute_event",
    "roc",
    "roc_figure",
    "threshold_test",
    "train_shadows",
]
