"""Experiments by recipe: a recipe file goes in, a run folder with model and facts comes out.

    from tacit.experiments import Recipe, load_model, train

    facts = train(Recipe.read("digits"), "runs/digits")
    facts.epsilon, facts.utility.mean
    load_model("runs/digits").predict(images)

Reading order: `recipe` (every setting), `training_run` and `training_loop` (DP-SGD), `pate_run`,
`regression_run`, `summary_run`, `table_check` and `paid_evaluation` (private
tables), `prediction`, `advice`, `features` (what is released before training), `recipe_classifier`
and `tuned_run` (tuning), `facts` and `folder` (what a run leaves behind), `audit`,
`demonstrations`, `replay`, `sweeps`, `regression_studies`, `logit`.
Modules that need torch load when one of their names is first used.
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy
from tacit.experiments.advice import (
    R2_NOT_WORTH,
    Advice,
    LinearAdvice,
    advise,
    advise_linear,
    is_r2_worth_paying,
)
from tacit.experiments.audit import RunAudit, audit_run
from tacit.experiments.coefficients import Coefficients, coefficients_of
from tacit.experiments.data import HopelessTable, count_records
from tacit.experiments.facts import (
    ADVERSARY,
    AUDIT,
    EXPOSURE,
    FACTS,
    FINETUNE,
    INPUTS,
    RECIPE,
    SAMPLES,
    SUMMARY,
    Facts,
    Metric,
    SeedValue,
    Touch,
    Utility,
    claim_fields,
    file_hash,
    folder_hash,
    ledger_state,
    majority_share,
    package_hash,
    seal_of,
    versions,
)
from tacit.experiments.folder import RunFolder
from tacit.experiments.logit import Ascent, LogitStudy, study_logit
from tacit.experiments.paid_evaluation import (
    COMMONEST,
    PaidScores,
    pay_once,
    score_classes,
    score_losses,
)
from tacit.experiments.pate_run import run_pate, spend_all_on_votes
from tacit.experiments.prediction import Predictions, predict_table
from tacit.experiments.recipe import MOST_OUTSIDE, DataSettings, Published, Recipe, shipped
from tacit.experiments.regression_run import run_regression, run_transfer
from tacit.experiments.regression_studies import (
    ErrorCurve,
    Study,
    StudyTerms,
    line_data_sets,
    read_data_sets,
    read_study_table,
    read_vertices,
    study_frank_wolfe,
    study_functional,
    study_migration,
)
from tacit.experiments.summary_run import run_summary
from tacit.experiments.sweeps import SWEEP, Point, Summary, Sweep, SweepRun, sweep, sweep_pate
from tacit.experiments.table_check import rng_of
from tacit.experiments.text_settings import (
    CanarySettings,
    FinetuneSettings,
    LanguageModelSettings,
    SampleSettings,
    TextSettings,
)
from tacit.experiments.training_touches import step_touches

if TYPE_CHECKING:
    from tacit.experiments.recipe_classifier import RecipeClassifier
    from tacit.experiments.released import load_model
    from tacit.experiments.replay import Replayed, replay_run
    from tacit.experiments.training_loop import require_device, sampling_in_words, users_of
    from tacit.experiments.training_run import (
        OnProgress,
        Progress,
        Session,
        begin_run,
        ledger_of_rank,
        train,
    )
    from tacit.experiments.tuned_run import SEARCH, tune

__all__ = [
    "ADVERSARY",
    "AUDIT",
    "COMMONEST",
    "EXPOSURE",
    "FACTS",
    "FINETUNE",
    "INPUTS",
    "MOST_OUTSIDE",
    "R2_NOT_WORTH",
    "RECIPE",
    "SAMPLES",
    "SEARCH",
    "SUMMARY",
    "SWEEP",
    "Advice",
    "Ascent",
    "CanarySettings",
    "Coefficients",
    "DataSettings",
    "ErrorCurve",
    "Facts",
    "FinetuneSettings",
    "HopelessTable",
    "LanguageModelSettings",
    "LinearAdvice",
    "LogitStudy",
    "Metric",
    "OnProgress",
    "PaidScores",
    "Point",
    "Predictions",
    "Progress",
    "Published",
    "Recipe",
    "RecipeClassifier",
    "Replayed",
    "RunAudit",
    "RunFolder",
    "SampleSettings",
    "SeedValue",
    "Session",
    "Study",
    "StudyTerms",
    "Summary",
    "Sweep",
    "SweepRun",
    "TextSettings",
    "Touch",
    "Utility",
    "advise",
    "advise_linear",
    "audit_run",
    "begin_run",
    "claim_fields",
    "coefficients_of",
    "count_records",
    "file_hash",
    "folder_hash",
    "is_r2_worth_paying",
    "ledger_of_rank",
    "ledger_state",
    "line_data_sets",
    "load_model",
    "majority_share",
    "package_hash",
    "pay_once",
    "predict_table",
    "read_data_sets",
    "read_study_table",
    "read_vertices",
    "replay_run",
    "require_device",
    "rng_of",
    "run_pate",
    "run_regression",
    "run_summary",
    "run_transfer",
    "sampling_in_words",
    "score_classes",
    "score_losses",
    "seal_of",
    "shipped",
    "spend_all_on_votes",
    "step_touches",
    "study_frank_wolfe",
    "study_functional",
    "study_logit",
    "study_migration",
    "sweep",
    "sweep_pate",
    "train",
    "tune",
    "users_of",
    "versions",
]

_TRAINING = ("OnProgress", "Progress", "Session", "begin_run", "ledger_of_rank", "train")
_HOMES = dict.fromkeys(_TRAINING, "training_run")
_HOMES |= dict.fromkeys(("SEARCH", "tune"), "tuned_run")
_HOMES |= dict.fromkeys(("Replayed", "replay_run"), "replay")
_HOMES |= {"RecipeClassifier": "recipe_classifier", "load_model": "released"}
_HOMES |= dict.fromkeys(("require_device", "sampling_in_words", "users_of"), "training_loop")
__getattr__ = lazy(__name__, _HOMES)
