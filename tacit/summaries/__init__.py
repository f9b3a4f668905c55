"""Private summaries of a table, each with a confidence interval, paid from one budget.

`describe` gives counts, means, standard deviations, quantiles and shares of all declared columns.
The other functions give one kind of statistic each, or evaluate predictions on private labels. What
is released has an `event`; with `ledger=` it is paid before anything is released.
"""

from tacit.summaries.averages import covariance, mean, variance
from tacit.summaries.contributions import choose_bound, limit_records
from tacit.summaries.counts import (
    FlagCounts,
    OutsideCount,
    contingency_table,
    count,
    count_outside,
    histogram,
)
from tacit.summaries.describe import Tally, describe
from tacit.summaries.noisy_scores import (
    accuracy,
    auc,
    auc_and_commonest,
    commonest_share,
    log_loss,
    mean_squared_error,
    r2,
    r2_half_width,
)
from tacit.summaries.payment import ReleaseTerms
from tacit.summaries.quantiles import PrivateBounds, private_bounds, quantiles
from tacit.summaries.statistic import Statistic, StatisticTable

__all__ = [
    "FlagCounts",
    "OutsideCount",
    "PrivateBounds",
    "ReleaseTerms",
    "Statistic",
    "StatisticTable",
    "Tally",
    "accuracy",
    "auc",
    "auc_and_commonest",
    "choose_bound",
    "commonest_share",
    "contingency_table",
    "count",
    "count_outside",
    "covariance",
    "describe",
    "histogram",
    "limit_records",
    "log_loss",
    "mean",
    "mean_squared_error",
    "private_bounds",
    "quantiles",
    "r2",
    "r2_half_width",
    "variance",
]
