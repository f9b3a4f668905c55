"""Experiments by recipe: data, features, model and budget in, a run folder out.

    from tacit.experiments import Recipe, load_model, train

    facts = train(Recipe.read("digits"), "runs/digits")
    facts.epsilon, facts.utility.mean
    load_model("runs/digits").predict(images)

Reading order: `recipe` and `settings` (what can be said), `train` and `session` (what is done),
`features` (what it costs before training), `run` (what is left behind), `sweep` (many runs).
"""

from tacit.experiments.audit import audit_run
from tacit.experiments.logit import Ascent, LogitStudy, study_logit
from tacit.experiments.pate import PATERecipe, run_pate
from tacit.experiments.pate_sweep import Point, sweep_pate
from tacit.experiments.recipe import Recipe
from tacit.experiments.released import load_model
from tacit.experiments.run import RECIPE, Facts, Metric, RunFolder
from tacit.experiments.session import OnProgress, Progress
from tacit.experiments.sweep import SWEEP, Summary, Sweep, sweep
from tacit.experiments.train import train

__all__ = [
    "RECIPE",
    "SWEEP",
    "Ascent",
    "Facts",
    "LogitStudy",
    "Metric",
    "OnProgress",
    "PATERecipe",
    "Point",
    "Progress",
    "Recipe",
    "RunFolder",
    "Summary",
    "Sweep",
    "audit_run",
    "load_model",
    "run_pate",
    "study_logit",
    "sweep",
    "sweep_pate",
    "train",
]
