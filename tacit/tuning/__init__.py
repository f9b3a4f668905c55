"""Private tuning: choose among configurations, and pay for the choice.

`PrivateSearch` draws the number of runs and their configurations, pays for the whole search once,
and releases one configuration with its model and score. Reading order: `search` (the estimator),
`search_plan` (what is paid), `laws` (how many runs), `holdout` (where scores come from),
`private_run` (one run), `unfinished` (what a killed search leaves behind).
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy
from tacit.tuning.holdout import CoinSplit, FixedSplit
from tacit.tuning.laws import CheapTrials, EveryConfiguration, RandomRuns, choose_runs
from tacit.tuning.private_run import SearchFailed
from tacit.tuning.search_plan import SearchPlan, plan_search, plan_trials

if TYPE_CHECKING:
    from tacit.tuning.search import PrivateSearch

__all__ = [
    "CheapTrials",
    "CoinSplit",
    "EveryConfiguration",
    "FixedSplit",
    "PrivateSearch",
    "RandomRuns",
    "SearchFailed",
    "SearchPlan",
    "choose_runs",
    "plan_search",
    "plan_trials",
]

__getattr__ = lazy(__name__, {"PrivateSearch": "search"})
