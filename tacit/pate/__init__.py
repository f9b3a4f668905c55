"""PATE: teachers on disjoint private parts vote on public inputs; a student learns noisy labels.

`PATEClassifier` does everything in one call. The steps are also available one by one:
`train_teachers` (any classifier with fit and predict) or `train_stacked_teachers` (hundreds of
small torch models at once), `count_votes`, then one of `LaplaceMax`, `GNMax`, `ConfidentGNMax`,
whose `.answer` pays the ledger and releases labels. Papernot et al. 2017 (arXiv:1610.05755) and
2018 (arXiv:1802.08908).

>>> from tacit import Budget, Ledger
>>> ledger = Ledger(budget=Budget(epsilon=1.0, delta=1e-5))
>>> votes = [[240, 6, 4], [130, 118, 2]]
>>> ConfidentGNMax(threshold=200, sigma_threshold=50, sigma_answer=40).answer(
...     votes, ledger=ledger, rng=0
... )
array([ 0, -1])
"""

from tacit.pate.character_features import character_features
from tacit.pate.classifier import OverlapWarning, PATEClassifier, spend_budget
from tacit.pate.gnmax import ConfidentGNMax, GNMax
from tacit.pate.journal import Journal
from tacit.pate.laplace_max import LaplaceMax
from tacit.pate.student import SpreadStudent, spread_queries
from tacit.pate.teachers import (
    KernelTeacher,
    Progress,
    Stacked,
    StackedTeachers,
    TeacherTraining,
    TorchTeacher,
    partition,
    train_stacked_teachers,
    train_teachers,
)
from tacit.pate.votes import NO_ANSWER, Aggregator, TeacherError, count_votes

__all__ = [
    "NO_ANSWER",
    "Aggregator",
    "ConfidentGNMax",
    "GNMax",
    "Journal",
    "KernelTeacher",
    "LaplaceMax",
    "OverlapWarning",
    "PATEClassifier",
    "Progress",
    "SpreadStudent",
    "Stacked",
    "StackedTeachers",
    "TeacherError",
    "TeacherTraining",
    "TorchTeacher",
    "character_features",
    "count_votes",
    "partition",
    "spend_budget",
    "spread_queries",
    "train_stacked_teachers",
    "train_teachers",
]
