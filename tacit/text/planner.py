"""The planner: batch, steps and noise of a fine-tuning run at a budget, from public facts only.

A step adds noise of standard deviation sigma * clip_norm to a sum over about B records. What is
left of it in the mean over T steps, in units of clip_norm, is the noise-to-batch ratio

    sigma / (B * sqrt(T)).

At a budget and a number of epochs (B * T fixed), sigma follows from B, and the ratio falls as B
grows: large batches are better (Li et al. 2022, arXiv:2110.05679, section 3; De et al. 2022,
arXiv:2204.13650, section 5; Sander et al. 2023, arXiv:2210.03403, for sigma / B as what a step
learns by). The least is that of full batches, which leave few steps. The planner takes the smallest
batch whose ratio is at most `WITHIN` times the least. If that leaves fewer than `LEAST_STEPS`
steps, it takes smaller batches, as long as the ratio is at most `WORST` times the least: few
records then get fewer steps, not tiny batches. The three constants are ours.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from tacit import accounting
from tacit.events import Event, Gaussian, Relation, Repeated, Sequence
from tacit.experiments import Recipe
from tacit.ledger import restart_reserve
from tacit.sampling import Poisson

WITHIN, WORST = 1.5, 2.5
LEAST_STEPS = 100
_RATES = {"full": 1e-3, "lora": 2e-3}


class Candidate(NamedTuple):
    """A batch size with the steps and the noise that go with it at the budget."""

    batch_size: int
    steps: int
    noise_multiplier: float

    @property
    def ratio(self) -> float:
        """The noise-to-batch ratio of the whole run."""
        return self.noise_multiplier / (self.batch_size * math.sqrt(self.steps))


class Correlation(NamedTuple):
    """Noise that is correlated over `bands` steps, at the price of the independent noise.

    `saving` is how many times less noise running sums carry than with independent noise.
    """

    bands: int
    noise_multiplier: float
    saving: float

    def __str__(self) -> str:
        if self.bands == 1:
            return "  noise: independent, since correlation over steps does not pay here"
        more = f"{1 / self.saving:.2f} times more" if self.saving < 1 else ""
        return (
            f"  noise: correlated over {self.bands} steps, noise multiplier "
            f"{self.noise_multiplier:.3f}; running sums carry "
            f"{more or f'{self.saving:.2f} times less'} noise"
        )


class FinetuningPlan(NamedTuple):
    """What the planner chose, and the candidates that it compared, from the largest batch down.

    `correlation` is None unless correlated noise was asked for.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    correlation: Correlation | None = None

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of the run."""
        return (self.correlation or self.chosen).noise_multiplier

    @property
    def bands(self) -> int:
        """Number of steps over which noise is correlated; 1 for independent noise."""
        return 1 if self.correlation is None else self.correlation.bands

    def __str__(self) -> str:
        return "\n".join(map(str, [self._compared(), *filter(None, [self.correlation])]))

    def _compared(self) -> str:
        if len(self.candidates) == 1:
            return (
                f"plan: batch {self.chosen.batch_size:,} as given, {self.chosen.steps:,} steps, "
                f"noise multiplier {self.chosen.noise_multiplier:.3f}"
            )
        least = self.candidates[0].ratio
        lines = ["plan: batch, steps, noise multiplier, noise-to-batch ratio over the least"]
        for one in self.candidates:
            mark = "  <- chosen" if one.batch_size == self.chosen.batch_size else ""
            lines.append(
                f"  {one.batch_size:>9,} {one.steps:>7,} {one.noise_multiplier:>8.3f} "
                f"{one.ratio / least:>6.2f}{mark}"
            )
        lines.append(
            f"  rule: the smallest batch within {WITHIN:g} times the least ratio, or within "
            f"{WORST:g} times for {LEAST_STEPS} steps; chosen from the budget, the number of "
            "records and the epochs"
        )
        if self.chosen.steps < LEAST_STEPS:
            lines.append(
                f"  few steps: smaller batches would drown in noise at this budget. More epochs "
                f"give more steps (finetune.epochs = {self._epochs_for_enough_steps():g})."
            )
        return "\n".join(lines)

    def _epochs_for_enough_steps(self) -> int:
        """Return the epochs in which the chosen batch takes `LEAST_STEPS` steps."""
        n_records = self.candidates[0].batch_size  # the first candidate is the full batch
        return math.ceil(LEAST_STEPS * self.chosen.batch_size / n_records)


def plan_finetuning(
    n_records: int,
    *,
    epsilon: float,
    delta: float,
    epochs: float,
    batch_size: int | None = None,
    relation: Relation = Relation.ADD_REMOVE,
    also: tuple[Event, ...] = (),
    bands: int | str | None = None,
    most_bands: int = 256,
) -> FinetuningPlan:
    """Return the batch size, steps and noise for a budget and a number of epochs.

    Candidates are compared without the steps that a run reserves for a restart; the noise of the
    chosen one pays for them, too.
    With `batch_size`, only steps and noise are chosen. `also` are other releases that the budget
    pays for. Noise is correlated over `bands` steps, for "auto" over at most `most_bands`; the
    batch size is the one for independent noise. No record is looked at.

    >>> plan = plan_finetuning(20_000, epsilon=8.0, delta=1e-5, epochs=5)
    >>> plan.chosen.batch_size, plan.chosen.steps
    (884, 114)
    """

    def candidate(batch: int, *, is_kept: bool = False) -> Candidate:
        steps = math.ceil(epochs * n_records / batch)
        paid = steps + (restart_reserve(steps) if is_kept else 0)

        def event(noise: float) -> Event:
            step = Poisson(batch / n_records).amplify(Gaussian(noise))
            return Sequence((*also, Repeated(step, paid)))

        noise = accounting.calibrate(event, epsilon=epsilon, delta=delta, relation=relation)
        return Candidate(batch, steps, noise)

    def planned(chosen: Candidate, *found: Candidate) -> FinetuningPlan:
        chosen = candidate(chosen.batch_size, is_kept=True)
        if bands is None:
            return FinetuningPlan(chosen, found)
        budget = {"epsilon": epsilon, "delta": delta, "relation": relation, "also": also}
        setting = {"batch_size": chosen.batch_size, "n_records": n_records, "steps": chosen.steps}
        options = {"bands": bands, "most": most_bands}
        return FinetuningPlan(chosen, found, _correlation(**options, **setting, **budget))

    if batch_size is not None:
        given = candidate(min(batch_size, n_records))
        return planned(given, given)
    sizes = [n_records]
    while sizes[-1] > max(1, n_records // 1024):
        sizes.append(max(1, round(sizes[-1] / math.sqrt(2))))
    best = candidate(n_records)
    found = [best]
    for size in sizes[1:]:
        found.append(candidate(size))
        share = found[-1].ratio / found[0].ratio
        if share <= WITHIN or (share <= WORST and best.steps < LEAST_STEPS):
            best = found[-1]
        elif best.steps >= LEAST_STEPS or share > WORST:
            break
    return planned(best, *found)


def _correlation(
    *, bands: int | str, most: int, steps: int, **setting: Any
) -> Correlation:  # Any: the options of `price_bands`
    from tacit.training import price_bands  # needs torch

    setting |= {"steps": steps, "is_kept": True}
    asked = "auto" if bands == "auto" else min(int(bands), steps)
    found = price_bands(asked, most=most, **setting)
    saving = price_bands(1, **setting).noise / found.noise
    return Correlation(found.bands, found.noise_multiplier, saving)


def filled(
    recipe: Recipe, n_records: int, also: tuple[Event, ...] = (), *, most_bands: int = 256
) -> tuple[Recipe, FinetuningPlan]:
    """Return the recipe with every default replaced by its value, and the plan of its run.

    `n_records` is assumed public. `most_bands` limits `bands = "auto"`.
    """
    settings, privacy = recipe.finetune, recipe.privacy
    unit = "person" if recipe.text.person and privacy.unit == "record" else privacy.unit
    delta = privacy.delta or min(1e-5, 0.1 / n_records)
    privacy = replace(privacy, delta=delta, unit=unit)
    plan = plan_finetuning(
        n_records,
        epsilon=privacy.budget.epsilon,
        delta=delta,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        relation=Relation(privacy.relation),
        also=also,
        bands=settings.bands,
        most_bands=most_bands,
    )
    settings = replace(
        settings,
        batch_size=plan.chosen.batch_size,
        bands=None if settings.bands is None else plan.bands,
        learning_rate=settings.learning_rate or _RATES[settings.train],
    )
    return replace(recipe, finetune=settings, privacy=privacy), plan
