"""Private fine-tuning of language models, by recipe: `tacit finetune RECIPE`.

    from tacit.experiments import Recipe
    from tacit.text import finetune

    facts = finetune(Recipe.read("reviews.toml", method="finetune"), "runs/reviews")

Reading order: `text_records` (files become token sequences, by unit of privacy), `tokenizer`,
`language_model`, `planner` (batch, steps and noise at a budget), `materials` (what a run is made
of), `finetune_run` (one recipe becomes one run folder), `trained_weights` (checks until the end),
`exposure` (canaries).
The extra `text` brings what it needs: `pip install 'tacit-dp[text]'`. Torch and transformers load
on first use.
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy
from tacit.text.exposure import CHANCE, Canary, Exposures, exposures, make_canaries
from tacit.text.planner import FinetuningPlan, plan_finetuning
from tacit.text.tokenizer import train_tokenizer
from tacit.text.trained_weights import TrainedWeights, UntrainedWeights

if TYPE_CHECKING:
    from tacit.text.finetune_run import finetune

__all__ = [
    "CHANCE",
    "Canary",
    "Exposures",
    "FinetuningPlan",
    "TrainedWeights",
    "UntrainedWeights",
    "exposures",
    "finetune",
    "make_canaries",
    "plan_finetuning",
    "train_tokenizer",
]

__getattr__ = lazy(__name__, {"finetune": "finetune_run"})
