"""Auditing: attack a trained model for a lower bound on epsilon, which must not exceed the bill.

The bill is the epsilon that was charged for the run; a valid lower bound above it proves a bug.
"""

from tacit.auditing.canaries import GradientCanaries, flip_coins
from tacit.auditing.event_test import BillTest, noise_bound, refute_event
from tacit.auditing.inversion import fit_softmax, invert, likeness, reconstruct
from tacit.auditing.lira import (
    ROC,
    Shadows,
    best_tpr,
    halves,
    lira,
    logit_confidence,
    minus_loss,
    roc,
    roc_points,
    train_shadows,
)
from tacit.auditing.one_run import AuditBound, one_run, one_run_gaussian, plan_guesses
from tacit.auditing.p_values import Finding, MechanismAudit, holm, joined
from tacit.auditing.partition_audit import audit_partition
from tacit.auditing.pure_noise import noise_findings, shared_noise
from tacit.auditing.release_audit import Result, audit_algorithm, audit_mechanism, recorded
from tacit.auditing.threshold import threshold_test
from tacit.auditing.training_audit import audit_training, user_findings
from tacit.auditing.training_setup import TrainingSetup
from tacit.auditing.user_audit import scores_by_user

__all__ = [
    "ROC",
    "AuditBound",
    "BillTest",
    "Finding",
    "GradientCanaries",
    "MechanismAudit",
    "Result",
    "Shadows",
    "TrainingSetup",
    "audit_algorithm",
    "audit_mechanism",
    "audit_partition",
    "audit_training",
    "best_tpr",
    "fit_softmax",
    "flip_coins",
    "halves",
    "holm",
    "invert",
    "joined",
    "likeness",
    "lira",
    "logit_confidence",
    "minus_loss",
    "noise_bound",
    "noise_findings",
    "one_run",
    "one_run_gaussian",
    "plan_guesses",
    "reconstruct",
    "recorded",
    "refute_event",
    "roc",
    "roc_points",
    "scores_by_user",
    "shared_noise",
    "threshold_test",
    "train_shadows",
    "user_findings",
]
