"""Fine-tuning by recipe: one recipe becomes one run folder, also across interruptions.

Guarantee: everything in the folder, except `secret/`, is computed from the private texts by the
releases that `facts.event` describes. Tokenizer, model before training, prompts and canaries are
public. The run is a `Session` of `tacit.experiments`: its ledger, checkpoints, resumption, ranks
and certificate are those of `tacit train`.

Beside the files of a run, the folder holds what `save_pretrained` writes, so that transformers or
peft load it, and

    ├── inputs.json         hashes of the public files that the run began with
    ├── samples.json        texts that the trained model wrote after public prompts
    └── exposure.json       exposure of canaries, if the recipe has some
"""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.datasets import Dataset
from tacit.errors import WeakGuarantee
from tacit.events import Event, PureDP
from tacit.events import Sequence as EventSequence
from tacit.experiments import (
    COMMONEST,
    EXPOSURE,
    FINETUNE,
    INPUTS,
    RECIPE,
    SAMPLES,
    Facts,
    Metric,
    OnProgress,
    PaidScores,
    Progress,
    Recipe,
    RunFolder,
    SeedValue,
    Session,
    Touch,
    Utility,
    begin_run,
    claim_fields,
    ledger_of_rank,
    majority_share,
    pay_once,
    rng_of,
    sampling_in_words,
    score_classes,
    score_losses,
    step_touches,
    users_of,
)
from tacit.mechanisms import optimal_bands, step_deviations
from tacit.text.exposure import CHANCE, exposures
from tacit.text.language_model import (
    Files,
    Scores,
    evaluating,
    perplexity,
    read_back,
    saved_files,
    score,
    write_text,
)
from tacit.text.materials import Materials, keep_inputs, read_materials
from tacit.text.planner import FinetuningPlan, filled
from tacit.text.text_records import Text
from tacit.text.trained_weights import TrainedWeights, require_saved
from tacit.training import AdamBC, Banded, Checkpoint, Ranks, make_private

METRICS, BASELINE = "metrics.jsonl", "baseline.jsonl"
_LEAST_FLOOR = 1e-16  # of the second moment, where there is no noise to speak of
_LEAST_TWIN_BATCH, _TWIN_STEPS = 32, 512  # records in a step of the twin; steps of an epoch
_TWIN_ROWS = 10  # rows of metrics of the twin


def finetune(
    recipe: Recipe,
    path: str | os.PathLike[str],
    *,
    root: str | Path | None = None,
    on_progress: OnProgress | None = None,
    on_plan: Callable[[FinetuningPlan], None] | None = None,
    lost_steps: str = "reserve",
) -> Facts:
    """Start or resume the run in folder `path`, and return its facts; a finished run is not rerun.

    Parameters
    ----------
    root
        Folder of texts, models and tokenizers, default `TACIT_DATA`.
    on_plan
        Called on rank 0 with the plan of a run, before anything is paid.
    lost_steps
        What to do if an interrupted run has lost more than its reserve: see
        `tacit.training.Checkpoint`.
    """
    if recipe.method != "finetune":
        raise ValueError(f'the recipe is of method {recipe.method}, not "finetune".')
    folder, ranks, told = RunFolder(path), Ranks.here(), on_progress or (lambda _: None)
    with contextlib.ExitStack() as stack:
        ranks.on_first(lambda: stack.enter_context(folder.locked()) and None)
        place = ranks.on_first(lambda: folder.data_root(root)) if root is None else root
        told(Progress(0, 0, {}, is_measured=False, doing="reading the texts"))
        materials = read_materials(recipe, Path(place or os.environ.get("TACIT_DATA") or "."))
        planned = _evaluation_plan(recipe)
        told(Progress(0, 0, {}, is_measured=False, doing="reading the model"))
        is_new = ranks.on_first(lambda: not (folder / RECIPE).is_file())
        most = ranks.on_first(lambda: _tried(materials, is_new=is_new))
        told(Progress(0, 0, {}, is_measured=False, doing="planning"))
        recipe, plan = filled(recipe, materials.dataset.n_records, planned, most_bands=most)
        materials = replace(materials, recipe=recipe)
        asked, n_records = recipe.privacy.budget, materials.dataset.n_records
        WeakGuarantee.issue(epsilon=asked.epsilon, delta=asked.delta, n_records=n_records)

        if (finished := begin_run(folder, recipe, place, ranks, verb="finetune")) is not None:
            return finished
        ranks.on_first(lambda: keep_inputs(folder, materials))
        if on_plan is not None and ranks.rank == 0:
            on_plan(plan)
        budget = None if planned or recipe.privacy.ledger else recipe.privacy.budget
        with ledger_of_rank(folder, recipe, budget, ranks) as ledger:
            told(Progress(0, 0, {}, is_measured=False, doing="tracing the program of one text"))
            session = FinetuneSession(
                recipe,
                folder,
                materials.dataset,
                ledger,
                folder.path,
                ranks=ranks,
                lost_steps=lost_steps,
                materials=materials,
                plan=plan,
                told=told,
            )
            session.go(told)
            return ranks.on_first(lambda: session.finish(session.train_twin()))


def _tried(materials: "Materials", *, is_new: bool) -> int:
    """Return the most bands of correlated noise for which there is memory, if that matters.

    The model of a new run is built and asked for the losses of random tokens, so that one that
    cannot be trained is refused before there is a run folder.
    """
    is_auto = materials.recipe.finetune.bands == "auto"
    if not (is_new or is_auto):
        return Banded().most_bands
    model = materials.model(0)
    if is_new:
        ids, targets = materials.public_batch()
        with torch.no_grad(), evaluating(model):
            materials.loss(model)(model, (ids[:1], targets[:1]))
    if not is_auto:
        return Banded().most_bands
    trained = (p.numel() for p in model.parameters() if p.requires_grad)
    return Banded().limited_by_memory(sum(trained)).most_bands


class FinetuneLoop:
    """A language model in private training, with its optimizer and the checks of its weights."""

    ema, latest = None, None  # a fine-tuned model is released as it is at the end

    def __init__(
        self,
        materials: Materials,
        *,
        plan: FinetuningPlan,
        noise_multiplier: float,
        ledger: Any,  # Any: a Ledger
        also: tuple[Event, ...],
        seed: int,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        recipe, dataset = materials.recipe, materials.dataset
        settings = recipe.finetune
        self.materials, self.also = materials, also
        self.model = materials.model(seed)
        self.loss = materials.loss(self.model)
        lot = min(plan.chosen.batch_size, dataset.n_records / plan.bands)
        noise_std = noise_multiplier * settings.clip_norm / lot
        noise_std *= step_growth(plan.chosen.steps, plan.bands)
        self.optimizer = make_optimizer(
            self.model, settings.learning_rate or 1e-3, noise_std=noise_std
        )
        self.trained = TrainedWeights(self.model)
        self._is_averaged = plan.bands > 1
        self.private = make_private(
            self.model,
            self.optimizer,
            loss_fn=self.loss,
            **materials.records(),
            batch_size=plan.chosen.batch_size,
            steps=plan.chosen.steps,
            clip_norm=settings.clip_norm,
            noise_multiplier=noise_multiplier,
            delta=recipe.privacy.delta,
            n_records=dataset.n_records,
            users=users_of(dataset.persons, n_rows=len(dataset.x_train)),
            ledger=ledger,
            checkpoint=checkpoint,
            also=also,
            seed=recipe.run.seed,
            noise=Banded(bands=plan.bands) if plan.bands > 1 else None,
        )

    def steps(self) -> Iterator[int]:
        """Take all remaining steps; after each, yield the number of steps taken so far."""
        private, settings = self.private, self.materials.recipe.finetune
        if private.steps_taken == private.steps:  # resumed after its last step
            return
        rate, first = settings.learning_rate or 1e-3, private.steps_taken + 1
        for lot in private:
            for group in self.optimizer.param_groups:
                group["lr"] = rate * (1 - private.steps_taken / private.steps)
            private.step(lot)
            step = private.steps_taken
            if is_checked(step, private.steps, settings.check_after, resumed_at=first):
                self.check()
            yield step

    def check(self) -> None:
        """Raise unless every trained weight has moved, counts, and is what is written by.

        What has moved, and what changes the output, is asked of the steps since the last check.
        """
        ids, targets = self.materials.public_batch()
        self.trained.require_moved()
        if not self._is_counted:  # later, a loss may have become flat somewhere
            self.trained.require_counted(lambda: self.loss(self.model, (ids, targets)))
            self._is_counted = True
        scored = (ids[:4].cpu().numpy(), targets[:4].cpu().numpy())
        with self.released():
            self.trained.require_used(lambda: next_logits(self)(ids[:1]), of="generation")
            self.trained.require_used(
                lambda: torch.from_numpy(scores_of(self, *scored).losses), of="evaluation"
            )
        self.trained.renew()

    _is_counted, _is_released = False, False

    @contextlib.contextmanager
    def released(self) -> Iterator[nn.Module]:
        """Hold the weights to release, averaged with correlated noise, ready to be evaluated.

        Inside such a block, another one changes nothing.
        """
        is_averaged = self._is_averaged and not self._is_released
        with self.private.averaged() if is_averaged else contextlib.nullcontext():
            before, self._is_released = self._is_released, True
            try:
                with evaluating(self.model):
                    yield self.model
            finally:
                self._is_released = before


def is_checked(step: int, steps: int, first: int, *, resumed_at: int) -> bool:
    """Return whether trained weights are checked after a step.

    They are after `first` steps, whenever that number has doubled, after the first step of a
    resumed run, and at the end. Half of the steps at least lie between the last two checks, unless
    they are few: weights that the last steps hardly move would otherwise seem to stand still.
    """
    if step in (min(first, steps), steps):
        return True
    if step < first or 2 * step > steps:
        return False
    doubled = step // first
    return step == resumed_at or (step % first == 0 and doubled & (doubled - 1) == 0)


def step_growth(steps: int, bands: int) -> float:
    """Return the root mean square noise of a step's gradient, relative to independent noise.

    Correlated noise is larger than that in each step, and smaller in sums of steps.
    """
    if bands == 1:
        return 1.0
    deviations = step_deviations(optimal_bands(steps, min(bands, steps)), steps)
    return float(np.sqrt(np.mean(deviations**2)))


def make_optimizer(model: nn.Module, rate: float, *, noise_std: float) -> torch.optim.Optimizer:
    """Return Adam, corrected for the noise, for the trainable weights of a model.

    A weight of which nothing but noise is seen moves as by Adam: the floor of its second moment is
    the noise's variance. So steps do not depend on the scale of gradients, which clip norm and
    batch size set.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    return AdamBC(weights, lr=rate, floor=max(noise_std**2, _LEAST_FLOOR))


def next_logits(loop: FinetuneLoop) -> Callable[[Tensor], Tensor]:
    """Return the function of token ids by which the trained model writes."""
    return lambda ids: loop.loss.logits(loop.model, ids.to(next(loop.model.parameters()).device))


def scores_of(loop: FinetuneLoop, ids: np.ndarray, targets: np.ndarray) -> Scores:
    """Return the scores of sequences by the trained model."""
    with loop.released() as model:
        return score(model, loop.loss, ids, targets)


@dataclass
class FinetuneSession(Session):
    """A running fine-tuning in memory; a restart rebuilds it from the run folder."""

    materials: Materials = None  # type: ignore[assignment]  # always given
    plan: FinetuningPlan = None  # type: ignore[assignment]  # always given
    told: OnProgress = field(default=lambda _: None)

    def _tell(self, doing: str) -> None:
        """Show what is done after the last step."""
        steps = self.private.steps
        self.told(Progress(steps, steps, {}, is_measured=False, doing=doing))

    def _calibrate(self) -> float:
        return self.plan.noise_multiplier

    def _make_loop(self) -> FinetuneLoop:  # type: ignore[override]  # it has what a run needs
        return FinetuneLoop(
            self.materials,
            plan=self.plan,
            noise_multiplier=self.noise,
            ledger=self.ledger,
            also=(),
            seed=self.init,
            checkpoint=self.checkpoint,
        )

    @property
    def _own(self) -> FinetuneLoop:
        assert isinstance(self.loop, FinetuneLoop)
        return self.loop

    @property
    def batch_size(self) -> int:
        """Expected records of a lot, by which epochs are counted."""
        return self.plan.chosen.batch_size

    def _score(self) -> Metric:
        return _metrics(
            scores_of(self._own, self.dataset.x_test, self.dataset.y_test), self.dataset
        )

    def finish(self, baseline: Sequence[Metric]) -> Facts:
        """Write the released model and then, as the last file, the facts; return the facts."""
        recipe, dataset, folder = self.recipe, self.dataset, self.folder
        self._tell("saving the model")
        with self.loop.released() as model:
            files = saved_files(model, self.materials.tokenizer, recipe)
            self._require_saved(files)
        for name, content in files.items():
            folder.write(name, content)
        folder.write_lines(METRICS, self.metrics)
        if baseline:
            folder.write_lines(BASELINE, baseline)
        self._tell("writing samples")
        self._write_samples()
        if self.materials.canaries:
            self._write_exposure()
        planned = _evaluation_plan(recipe)
        paid = self._evaluate() if planned else None
        event = self.private.event
        if paid is not None:
            event = EventSequence((event, paid.event))
        of, bands = "" if dataset.persons is None else "persons", self.plan.bands
        sampling = sampling_in_words(self.batch_size, self.n_records, bands=bands, of=of)
        done = {"steps": self.private.steps, "noise_multiplier": self.noise}
        done["reserve"] = self.private.info.get("reserve", 0)
        if self.plan.correlation is not None and bands > 1:
            done["noise_saving"] = round(self.plan.correlation.saving, 4)
        (weights,) = (name for name in files if name.endswith(".safetensors"))
        facts = Facts(
            **claim_fields(recipe, dataset.name, dataset.n_records, self.ledger, event),
            assumed_public=(*dataset.public, *_public_files(recipe)),
            sampling_assumed=sampling,
            sampling_used=sampling,
            touches=(*_touches(self.materials, paid, self.private.info, has_twin=bool(baseline)),),
            released=tuple(_releases(self.materials, paid)),
            isolation=self.private.isolation,
            arithmetic=self.private.arithmetic.text,
            generator=self.private.generator,
            data_fingerprint=self.private.data_fingerprint,
            method=FINETUNE,
            model=_in_words(self.loop.model, recipe),
            model_file=weights,
            hyperparameters=recipe.to_dict()["finetune"] | done,
            steps=self.private.steps,
            resumed=self.resumed,
            seconds=round(self._seconds, 3),
            utility=_utility(recipe, dataset, self.metrics, baseline, paid),
            baseline_file=BASELINE if baseline else None,
            # To be hashed in `finish`, beside the weights:
            files=dict.fromkeys((*(files.keys() - {weights}), INPUTS, SAMPLES, EXPOSURE), ""),
            records_per_person=dataset.records_per_person,
        )
        return folder.finish(facts, self.ledger)

    def _require_saved(self, files: Files) -> None:
        """Raise unless the files, loaded as others will load them, give the released model."""
        materials, (ids, _) = self.materials, self.materials.public_batch()
        loaded = read_back(
            files,
            self.recipe.language_model,
            self.recipe.finetune,
            materials.tokenizer,
            root=materials.root,
            classes=self.recipe.text.classes,
        )
        with torch.no_grad(), evaluating(loaded.to(ids.device)):
            found = self._own.loss.logits(loaded, ids[:2])
            require_saved(next_logits(self._own)(ids[:2]), found)

    def _evaluate(self) -> PaidScores:
        """Pay for scores on the private held-out texts, once in a run, and return them."""
        dataset, text = self.dataset, self.recipe.text
        (planned,) = _evaluation_plan(self.recipe)
        terms: dict[str, Any] = {"epsilon": planned.epsilon, "ledger": self.ledger}
        terms |= {"rng": rng_of(self.recipe, 2), "records_per_person": dataset.records_per_person}

        def pay() -> PaidScores:
            found = scores_of(self._own, dataset.x_test, dataset.y_test)
            if self.materials.is_causal:
                return score_losses(found.losses, upper=text.loss_upper, **terms)
            logits = found.logits
            odds = logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else None
            terms["n_classes"] = dataset.n_classes
            return score_classes(dataset.y_test, logits.argmax(1), odds, **terms)

        return pay_once(self.folder, pay)

    def _write_samples(self) -> None:
        """Write texts of the trained model after the recipe's public prompts."""
        asked, packing = self.recipe.samples, self.materials.packing
        rows: list[dict[str, str]] = []
        for prompt in asked.prompts or ("",):
            start = [*packing.start, *(packing.encode(prompt) if prompt else ())]
            for number in range(asked.count if self.materials.is_causal else 0):
                with self.loop.released():
                    found = write_text(
                        next_logits(self._own),
                        start,
                        end=self.materials.tokenizer.eos_token_id,
                        tokens=asked.tokens,
                        temperature=asked.temperature,
                        top=asked.top,
                        length=self.recipe.text.length,
                        seed=number,
                    )
                rows.append({"prompt": prompt, "text": self.materials.tokenizer.decode(found)})
        self.folder.write(SAMPLES, json.dumps({"samples": rows}, indent=2) + "\n")

    def _write_exposure(self) -> None:
        """Write the exposure of the canaries in the private model and in its twin, if any."""
        with self.loop.released() as model:
            found = {"private": self._exposure(model)}
        if self._twin is not None:
            found["without privacy"] = self._exposure(self._twin)
        asked = self.recipe.canaries
        content = {"chance": CHANCE, "repeats": asked.repeats, "references": asked.references}
        self.folder.write(EXPOSURE, json.dumps(content | {"models": found}, indent=2) + "\n")

    def _exposure(self, model: nn.Module) -> dict[str, Any]:  # Any: JSON values
        packing, loss = self.materials.packing, self._own.loss
        packing = replace(packing, settings=replace(packing.settings, person="", prompt=""))

        done = itertools.count(1)

        def losses(texts: Sequence[str]) -> list[float]:
            self._tell(f"ranking canary {next(done)}")
            packed = packing.sequences([Text(text) for text in texts])
            with evaluating(model):
                found = score(model, loss, packed.ids, packed.targets)
            return list(found.losses * found.tokens)

        found = exposures(self.materials.canaries, losses)
        return {"bits": [round(b, 4) for b in found.bits], "mean": found.mean,
                "error_at_chance": found.error, "p_value": found.p_value}  # fmt: skip

    _twin: nn.Module | None = None

    def train_twin(self) -> list[Metric]:
        """Train the same model without privacy, if the recipe says that the texts are public."""
        run, dataset = self.recipe.run, self.dataset
        if not (self.recipe.text.is_public and run.baseline_steps):
            return []
        model = self._twin = self.materials.model(self.init)
        ids, targets = self.materials.training_tensors()
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=run.baseline_rate)
        generator = torch.Generator().manual_seed(self.init)
        epochs = self.recipe.finetune.epochs
        size = max(_LEAST_TWIN_BATCH, len(ids) // _TWIN_STEPS)
        steps = min(run.baseline_steps, math.ceil(epochs * len(ids) / size))
        rows: list[Metric] = []
        order = torch.empty(0, dtype=torch.int64)
        for step in range(1, steps + 1):
            self._tell(f"training the twin without privacy, step {step} of {steps}")
            for group in optimizer.param_groups:
                group["lr"] = run.baseline_rate * (1 - (step - 1) / steps)
            if (start := (step - 1) * size % len(ids)) < size:
                order = torch.randperm(len(ids), generator=generator)
            batch = order[start : start + size].to(ids.device)
            optimizer.zero_grad()
            self._own.loss(model, (ids[batch], targets[batch])).mean().backward()
            optimizer.step()
            if step % max(1, steps // _TWIN_ROWS) == 0 or step == steps:
                row: Metric = {"step": step, "epoch": round(step * size / len(ids), 4)}
                if dataset.is_test_public:
                    with evaluating(model):
                        found = score(model, self._own.loss, dataset.x_test, dataset.y_test)
                    row |= _metrics(found, dataset)
                rows.append(row)
        return rows


def _metrics(found: Scores, dataset: Dataset) -> Metric:
    """Return the scores that are finite numbers: not all are, if training has diverged."""
    if dataset.n_classes is None:
        value = perplexity(found)
        scores = {"loss": math.log(value), "perplexity": value}
    else:
        right = float((found.logits.argmax(1) == dataset.y_test).mean())
        scores = {"loss": float(found.losses.mean()), "accuracy": right}
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def _evaluation_plan(recipe: Recipe) -> tuple[PureDP, ...]:
    """Return what the paid evaluation may cost at most: one event, or none if nothing is paid."""
    if recipe.text.evaluation == "none":
        return ()
    assert recipe.privacy.epsilon is not None  # set by the method's default
    return (PureDP(recipe.text.evaluation_share * recipe.privacy.epsilon),)


def _public_files(recipe: Recipe) -> Iterator[str]:
    if recipe.text.public_test:
        yield "the file of test texts"
    if recipe.language_model.tokenizer_text:
        yield "the text that the tokenizer was trained on"
    if recipe.samples.prompts:
        yield "the prompts of the samples"


def _in_words(model: nn.Module, recipe: Recipe) -> str:
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    every, trained = sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)
    kind = getattr(model.config, "model_type", "transformer")  # type: ignore[union-attr]
    how = f"LoRA of rank {recipe.finetune.lora_rank}" if recipe.finetune.train == "lora" else "full"
    task = "language model" if recipe.finetune.task == "causal" else "text classifier"
    return f"{kind} {task} of {every:,} weights, {trained:,} of them trained ({how})"


def _touches(
    materials: Materials, paid: PaidScores | None, info: dict[str, Any], *, has_twin: bool
) -> Iterator[Touch]:  # Any: numbers and lists of them
    recipe, dataset = materials.recipe, materials.dataset
    yield Touch(what="size", how="the number of training records is assumed public", cost="public")
    how = "texts become token sequences, unit by unit, by a tokenizer made without them"
    yield Touch(what="preprocessing", how=how, cost="free")
    yield from step_touches("the recipe and of the planner, which looks at no record", info)
    if dataset.is_test_public:
        how = f"on {dataset.n_held_out:,} texts that are declared public"
        yield Touch(what="evaluation", how=how, cost="public")
    if paid is not None:
        how = f"noisy scores on {dataset.n_held_out:,} {dataset.unit}s that were held out"
        yield Touch(what="evaluation", how=how, cost="paid", event=paid.event.to_dict())
    if has_twin:
        how = "a twin trained without noise, since the recipe says that the texts are public"
        yield Touch(what="baseline", how=how, cost="not covered")
    if materials.canaries:
        asked = recipe.canaries
        how = f"{asked.count} made-up secrets, {asked.repeats} times each, counted as records"
        yield Touch(what="canaries", how=how, cost="public")


def _releases(materials: Materials, paid: PaidScores | None) -> Iterator[str]:
    settings = materials.recipe.finetune
    weights = "mean of the last weights" if settings.bands not in (None, 1) else "final weights"
    yield f"{weights} of the adapter" if settings.train == "lora" else weights
    if materials.dataset.is_test_public:
        yield "metrics on public test texts after each epoch"
    if paid is not None:
        yield "noisy scores with intervals"
    if materials.is_causal and materials.recipe.samples.count:
        yield "texts that the trained model wrote"
    if materials.canaries:
        yield "exposure of canaries"


def _utility(
    recipe: Recipe,
    dataset: Dataset,
    metrics: Sequence[Metric],
    baseline: Sequence[Metric],
    paid: PaidScores | None,
) -> Utility:
    last = metrics[-1] if paid is None else paid.values
    is_causal = dataset.n_classes is None
    metric = ("perplexity" if paid is None else "loss") if is_causal else "accuracy"
    twin = baseline[-1] if baseline else {}
    seed, is_known = recipe.run.seed, is_causal or not dataset.is_test_public
    return Utility(
        metric=metric,
        private=(SeedValue(seed=seed, value=last[metric]),) if metric in last else (),
        non_private=(SeedValue(seed=seed, value=twin[metric]),) if metric in twin else (),
        majority=last.get(COMMONEST) if is_known else majority_share(dataset.y_test),
        others={name: last[name] for name in ("loss", "auc") if name in last and name != metric},
        n_test=dataset.n_held_out if metric in last else 0,
        intervals={} if paid is None else paid.intervals,
    )
