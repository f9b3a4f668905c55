"""DP-SGD by recipe: one recipe becomes one run folder, also across interruptions.

Guarantee: everything in the folder, except `secret/`, is computed from the training records by
releases that `facts.event` describes. Paid features and the whole training plan are paid before
they are released. A run that was killed resumes from its last checkpoint; the steps after it are
taken again with fresh lots and noise, out of the reserve of the plan.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tacit._whole_file import whole_file
from tacit.datasets import Dataset
from tacit.errors import BudgetExceeded, WeakGuarantee
from tacit.events import Event, PureDP, Relation, Sequence
from tacit.experiments import data, models
from tacit.experiments.facts import (
    BASELINE,
    METRICS,
    MODEL,
    RECIPE,
    REPLAY,
    SECRET,
    Facts,
    Metric,
    SeedValue,
    Utility,
    claim_fields,
    majority_share,
)
from tacit.experiments.features import (
    PaidSummary,
    cache_folder,
    prepare,
    shape_of,
    summaries_of,
)
from tacit.experiments.folder import RunFolder
from tacit.experiments.paid_evaluation import COMMONEST, PaidScores, pay_once, score_classes
from tacit.experiments.recipe import Recipe
from tacit.experiments.released import model_bytes
from tacit.experiments.table_check import (
    check_plan,
    check_table,
    rng_of,
    table_touches,
)
from tacit.experiments.training_loop import (
    TrainingLoop,
    evaluate,
    features_events,
    noise_multiplier,
    noise_saving,
    require_device,
    sampling_in_words,
    steps_of,
    tensors,
    train_baseline,
    training_event,
)
from tacit.experiments.training_touches import releases, touches
from tacit.ledger import Budget, Ledger
from tacit.training import Checkpoint, Key, Ranks, replay_state

FEATURES = "features.pt"
_CHECKPOINT = "checkpoint.pt"
_PATIENCE = 60.0  # seconds: a process that another thread has just forked holds copies of locks


class Progress(NamedTuple):
    """Public state of a run after a step; `is_measured` says whether `metric` is new.

    Before the first step and after the last one, `doing` says what takes long. `steps` is 0 if
    it is not known yet.
    """

    step: int
    steps: int
    metric: Metric
    is_measured: bool
    doing: str = ""


OnProgress = Callable[[Progress], None]


def train(
    recipe: Recipe,
    path: str | os.PathLike[str],
    *,
    root: str | Path | None = None,
    baseline: SequenceOf[Metric] | None = None,
    on_progress: OnProgress | None = None,
    cache: Path | None = None,
    lost_steps: str = "reserve",
) -> Facts:
    """Start or resume the run in folder `path`, and return its facts; a finished run is not rerun.

    Parameters
    ----------
    root
        Folder of the data, default `TACIT_DATA`.
    baseline
        Metrics of a non-private twin that was trained before. None trains one if the recipe asks
        for it.
    cache
        Folder for features that take long to compute; default the user's cache. It holds private
        values.
    lost_steps
        What to do if an interrupted run has lost more than its reserve: see
        `tacit.training.Checkpoint`.

    Examples
    --------
    >>> import tempfile
    >>> quick = Recipe.parse("[training]\\nepochs = 1\\n[run]\\nbaseline_steps = 0")
    >>> facts = train(quick, tempfile.mkdtemp())
    >>> facts.epsilon <= 3.0
    True
    """
    folder, ranks = RunFolder(path), Ranks.here()
    with contextlib.ExitStack() as stack:
        ranks.on_first(lambda: stack.enter_context(folder.locked()) and None)
        place = ranks.on_first(lambda: folder.data_root(root)) if root is None else root
        return _train(recipe, folder, ranks, place, baseline, on_progress, cache,
                      lost_steps=lost_steps)  # fmt: skip


def _train(
    recipe: Recipe,
    folder: RunFolder,
    ranks: Ranks,
    root: str | Path | None,
    baseline: SequenceOf[Metric] | None,
    on_progress: OnProgress | None,
    cache: Path | None,
    *,
    lost_steps: str = "reserve",
    is_handed_over: bool = False,
) -> Facts:
    """Do what `train` says, while rank 0 holds the folder. The other ranks write no file."""
    show = on_progress or (lambda _: None)
    with _begun(recipe, folder, ranks, root, cache, lost_steps=lost_steps,
                is_handed_over=is_handed_over, on_progress=show) as session:  # fmt: skip
        if isinstance(session, Facts):
            return session
        session.go(show)

        def finish() -> Facts:
            twin = baseline
            if twin is None or not recipe.data.holds_public_records:
                # Empty if the records are private.
                twin = train_baseline(
                    session.recipe, session.dataset, session.cache, seed=session.init
                )
            return session.finish(twin)

        return ranks.on_first(finish)


@contextlib.contextmanager
def _begun(
    recipe: Recipe,
    folder: RunFolder,
    ranks: Ranks,
    root: str | Path | None,
    cache: Path | None,
    *,
    lost_steps: str = "reserve",
    is_handed_over: bool = False,
    on_progress: OnProgress = lambda _: None,
) -> Iterator["Session | Facts"]:
    """Open the ledger, check the table, and yield the session; the facts of a finished run."""
    on_progress(Progress(0, 0, {}, is_measured=False, doing="reading the records"))
    dataset = data.load(recipe.data, root, takes_persons=True)
    recipe = _filled(recipe, dataset)
    training_event(recipe, dataset.n_records, 1.0, lot=recipe.training.lot)  # or it has no price
    asked = recipe.privacy.budget
    WeakGuarantee.issue(epsilon=asked.epsilon, delta=asked.delta, n_records=dataset.n_records)
    if dataset.persons is not None and summaries_of(recipe.features, 1):
        raise ValueError(
            "data.records_per_person above 1 cannot be used with features that are paid for: their "
            "noise is for one record of each person. Use features.kind none or projection."
        )

    if (finished := begin_run(folder, recipe, root, ranks)) is not None:
        yield finished
        return
    budget, epsilon = _budget(recipe, dataset), recipe.privacy.budget.epsilon
    with ledger_of_rank(folder, recipe, budget, ranks) as ledger:
        checked = ranks.on_first(
            lambda: check_table(recipe, dataset.flags, folder, ledger, epsilon=epsilon, root=root)
        )
        yield Session(recipe, folder, dataset, ledger, cache or cache_folder(), checked, ranks,
                      lost_steps=lost_steps, is_handed_over=is_handed_over,
                      on_progress=on_progress)  # fmt: skip


def begin_run(
    folder: RunFolder, recipe: Recipe, root: str | Path | None, ranks: Ranks, *, verb: str = "train"
) -> Facts | None:
    """Take the folder for a run of `recipe`; return the facts if that run is finished."""

    def begin() -> Facts | None:
        take_folder(folder, recipe, verb=verb)
        folder.remember_data(root)
        if folder.is_finished:
            folder.close()  # in case the run was killed just after it wrote its facts
            return folder.facts()
        return None

    return ranks.on_first(begin)


class PaidRun(NamedTuple):
    """A run that is paid, so that its steps can be taken by any process that sees its folder.

    `pay_for_run` and `finish_run` use the ledger; `take_steps`, which comes between them, does not.
    """

    recipe: Recipe
    path: Path
    root: str | Path | None
    cache: Path
    checked: tuple[Event, ...] = ()


def pay_for_run(
    recipe: Recipe, path: str | Path, *, root: str | Path | None, cache: Path
) -> PaidRun:
    """Prepare a run in folder `path`, and pay for all of its steps; a finished run is kept."""
    folder = RunFolder(path)
    with folder.locked():
        place = folder.data_root(root) if root is None else root
        paid = PaidRun(recipe, Path(path), place, cache)
        with _begun(recipe, folder, Ranks(), place, cache) as session:
            if isinstance(session, Facts):
                return paid
            session.private.pay_whole()
            return paid._replace(checked=session.checked)


def take_steps(paid: PaidRun) -> None:
    """Take the steps of a paid run; after an interruption, those after its last checkpoint."""
    folder = RunFolder(paid.path)
    with folder.locked(patience=_PATIENCE):
        if folder.is_finished:
            return
        if not (folder / SECRET / _CHECKPOINT).is_file():
            raise FileNotFoundError(
                f"there is no prepared run at {paid.path} here: every worker needs the file system "
                "of the process that started the runs."
            )
        dataset = data.load(paid.recipe.data, paid.root, takes_persons=True)
        recipe = _filled(paid.recipe, dataset)
        with _counting(recipe) as ledger:
            session = Session(recipe, folder, dataset, ledger, paid.cache, paid.checked,
                              is_handed_over=True)  # fmt: skip
            session.go(lambda _: None)


def finish_run(paid: PaidRun, baseline: SequenceOf[Metric]) -> Facts:
    """Write the model and the facts of a run whose steps were taken, and return the facts."""
    folder = RunFolder(paid.path)
    with folder.locked(patience=_PATIENCE):
        return _train(paid.recipe, folder, Ranks(), paid.root, baseline, None, paid.cache,
                      is_handed_over=True)  # fmt: skip


def ledger_of_rank(
    folder: RunFolder, recipe: Recipe, budget: Budget | None, ranks: Ranks
) -> contextlib.AbstractContextManager[Ledger]:
    """Return the ledger that pays: on rank 0. The others count their steps in memory."""
    opened = ranks.on_first(lambda: folder.open_ledger(recipe, budget).close())
    assert opened is None  # it can be opened: otherwise every rank has raised
    return folder.open_ledger(recipe, budget) if ranks.rank == 0 else _counting(recipe)


def _counting(recipe: Recipe) -> Ledger:
    """Return a ledger in memory that counts steps which another process pays for."""
    counting = Ledger(relation=Relation(recipe.privacy.relation), unit=recipe.privacy.unit)
    counting.declare_one_record_each()  # whoever pays has checked the unit
    return counting


@dataclass
class Session:
    """The state of a running training in memory; a restart rebuilds it from the run folder."""

    recipe: Recipe
    folder: RunFolder
    dataset: Dataset
    ledger: Ledger
    cache: Path
    checked: tuple[Event, ...] = ()
    """What was paid for the check of a private table."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that train the model together; the first of them writes all files."""
    metrics: list[Metric] = field(default_factory=list)
    resumed: int = 0
    seconds: float = 0.0
    lost_steps: str = "reserve"
    is_handed_over: bool = False
    """Another process has prepared the run for this one: that is no interruption."""
    on_progress: OnProgress = lambda _: None
    """What is told about the preparation; `go` takes its own."""

    def __post_init__(self) -> None:
        self.n_records, self._start = self.dataset.n_records, time.monotonic()
        self.paid_again: list[Event] = []  # summaries that were lost between payment and release
        self.summaries: dict[str, Any] = {}
        ranks, seed = self.ranks, self.recipe.run.seed
        state = ranks.on_first(self._read_checkpoint)
        fresh = int.from_bytes(os.urandom(4)) if seed is None else seed
        self.init = state["init"] if state else ranks.share(fresh)
        self.noise = state["noise"] if state else self._calibrate()
        self.checkpoint = Checkpoint(
            path=self._checkpoint, also={"run": self}, lost_steps=self.lost_steps
        )
        self.loop = self._make_loop()
        self.private = self.loop.private

    def _calibrate(self) -> float:
        """Return the noise multiplier with which the whole run costs at most its epsilon."""
        planned = (*self.checked, *_evaluation_plan(self.recipe, self.dataset))
        return noise_multiplier(self.recipe, self.n_records, planned, is_kept=True)

    def _make_loop(self) -> TrainingLoop:
        """Return the model in private training, with its features released and paid for."""
        recipe = self.recipe
        self.prepared = prepare(
            self.dataset,
            recipe.features,
            release=self._release,
            cache=self.cache,
            device=require_device(recipe).type,
            show=self._show,
        )
        self._show("testing that records do not influence each other")
        self.summaries = {n: torch.from_numpy(s) for n, s in self.prepared.summaries.items()}
        return TrainingLoop(
            recipe,
            models.build(recipe.model, self.prepared.shape, self.dataset.n_classes, seed=self.init),
            tensors(self.prepared.x_train, self.prepared.y_train),
            n_records=self.n_records,
            noise_multiplier=self.noise,
            ledger=self.ledger,
            also=(*self.checked, *features_events(recipe, self.n_records), *self.paid_again),
            seed=recipe.run.seed,
            persons=self.dataset.persons,
            checkpoint=self.checkpoint,
        )

    def _show(self, doing: str) -> None:
        steps = steps_of(self.recipe, self.n_records)
        self.on_progress(Progress(0, steps, {}, is_measured=False, doing=doing))

    @property
    def batch_size(self) -> int:
        """Expected records of a lot, by which epochs are counted."""
        return self.recipe.training.batch

    def go(self, on_progress: OnProgress) -> None:
        """Take all remaining steps, and measure the model at the end of each epoch.

        The states that a replay begins with are kept where the recipe asks for it, and where a
        process takes over from another one, since it has another key.
        """
        private = self.private
        if self.ranks.rank > 0:
            for _ in self.loop.steps():  # what is measured and written, rank 0 does alone
                pass
            return
        latest = self.metrics[-1] if self.metrics else {}
        kept = replay_steps(self.recipe.run.stretches, private.steps)
        if kept and private.steps_taken < private.steps:
            self._keep(private.steps_taken)
        on_progress(Progress(private.steps_taken, private.steps, latest, is_measured=False))
        per_epoch = self.n_records / self.batch_size
        if private.steps_taken == private.steps != latest.get("step"):  # the rest was skipped
            self.metrics.append(self._measure(private.steps))
        for step in self.loop.steps():
            if step in kept:
                self._keep(step)
            ends_epoch = int(step / per_epoch) > int((step - 1) / per_epoch)
            is_new = ends_epoch or step == private.steps
            if is_new:
                latest = self._measure(step)
                self.metrics.append(latest)
                self.folder.write_lines(METRICS, self.metrics)
            on_progress(Progress(step, private.steps, latest, is_new))

    def finish(self, baseline: SequenceOf[Metric]) -> Facts:
        """Write the released model and then, as the last file, the facts; return the facts."""
        with self.loop.released() as model:
            content = model_bytes(self.recipe, model, self.prepared, self.dataset.n_classes)
        self.folder.write_lines(METRICS, self.metrics)
        self.folder.write(MODEL, content)
        if baseline:
            self.folder.write_lines(BASELINE, baseline)
        recipe, dataset, steps = self.recipe, self.dataset, self.private.steps
        paid = self._evaluate() if _evaluation_plan(recipe, dataset) else None
        event = self.private.event if paid is None else Sequence((self.private.event, paid.event))
        training, bands = recipe.training, self.private.info.get("bands", 1)
        of = "" if dataset.persons is None else dataset.persons.sampled
        sampling = sampling_in_words(training.lot, self.n_records, bands=bands, of=of)
        done: dict[str, Any] = {"steps": steps, "noise_multiplier": self.noise}
        done["reserve"] = self.private.info.get("reserve", 0)
        if training.bands is not None:
            done["bands"] = bands  # fewer than asked for in a run of fewer steps
        if bands > 1:
            also = (*self.checked, *features_events(recipe, self.n_records))
            also += () if paid is None else (paid.event,)
            done["noise_saving"] = round(noise_saving(recipe, self.n_records, also), 4)
        facts = Facts(
            **claim_fields(recipe, dataset.name, dataset.n_records, self.ledger, event),
            assumed_public=(*dataset.public, *_public_tests(recipe, dataset)),
            sampling_assumed=sampling,
            sampling_used=sampling,
            touches=(
                *table_touches(recipe.data, dataset, self.checked, paid and paid.event),
                *touches(recipe, dataset, self.private.info, has_baseline=bool(baseline)),
            ),
            released=releases(recipe, dataset),
            isolation=self.private.isolation,
            arithmetic=self.private.arithmetic.text,
            generator=self.private.generator,
            data_fingerprint=self.private.data_fingerprint,
            method="DP-SGD",
            model=models.describe(recipe.model, self.loop.model, self.prepared.shape),
            hyperparameters=recipe.to_dict()["training"] | done,
            steps=steps,
            resumed=self.resumed,
            seconds=round(self._seconds, 3),
            utility=_utility(recipe, dataset, self.metrics, baseline, paid),
            baseline_file=BASELINE if baseline else None,
            records_per_person=dataset.records_per_person,
        )
        return self.folder.finish(facts, self.ledger)

    def _evaluate(self) -> PaidScores:
        """Pay for scores on the private held-out records, once in a run, and return them."""
        with self.loop.released() as model, torch.no_grad():
            device = next(model.parameters()).device
            logits = model(torch.from_numpy(self.prepared.x_test).to(device)).double().cpu().numpy()
        odds = logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else None
        (planned,) = _evaluation_plan(self.recipe, self.dataset)
        return pay_once(
            self.folder,
            lambda: score_classes(
                self.prepared.y_test,
                logits.argmax(1),
                odds,
                n_classes=logits.shape[1],
                epsilon=planned.epsilon,
                ledger=self.ledger,
                rng=rng_of(self.recipe, 2),
                records_per_person=self.dataset.records_per_person,
            ),
        )

    @property
    def _checkpoint(self) -> Path:
        return self.folder / SECRET / _CHECKPOINT

    def _measure(self, step: int) -> Metric:
        """Return the metrics after `step` steps, with the epsilon of a run that ends there."""
        found = self._score() if self.dataset.is_test_public and self.dataset.n_held_out else {}
        delta, released = self.recipe.privacy.budget.delta, self.loop.latest
        if released is not None and released.epoch_loss is not None:
            found["training_loss"] = released.epoch_loss
            found["training_loss_std"] = released.epoch_loss_std or 0.0
        epsilon = self.private.epsilon_at(step, delta=delta)
        epoch = round(step * self.batch_size / self.n_records, 4)
        return {"step": step, "epoch": epoch, "epsilon": epsilon, **found}

    def _score(self) -> Metric:
        """Return the metrics of the released weights on the public test records."""
        with self.loop.released() as model:
            return evaluate(model, *tensors(self.prepared.x_test, self.prepared.y_test))

    def _release(self, name: str, summary: PaidSummary, x: np.ndarray) -> np.ndarray:
        """Return a paid summary: the one that is stored, or else pay for it, release and store it.

        The note in the ledger contains a random name of the run. So two runs with the same seed and
        the same ledger both pay.
        """
        return self.ranks.on_first(lambda: self._release_once(name, summary, x))

    def _release_once(self, name: str, summary: PaidSummary, x: np.ndarray) -> np.ndarray:
        path, ledger = self.folder / SECRET / FEATURES, self.ledger
        stored = {"run": os.urandom(16).hex(), "values": {}}
        if path.is_file():
            stored = torch.load(path, weights_only=True)
        else:
            _write(path, stored)
        note = f"{name} for run {stored['run']}"
        earlier = [entry for entry in ledger.history() if entry.note == note]
        ledger.used.update(entry.id for entry in earlier)
        if name not in stored["values"]:
            if earlier and self.lost_steps == "reserve":
                raise BudgetExceeded(
                    f"the {name} of the features was paid, and the process ended before it was "
                    f"stored. With lost_steps='pay' {summary.event} is paid again."
                )
            earlier.append(ledger.spend(summary.event, note=note))
            key = Key.from_seed(self.recipe.run.seed)
            key = key if len(earlier) == 1 else key.of_attempt(f"{name} {len(earlier)}")
            stored["values"][name] = torch.from_numpy(summary.release(x, key.numpy(name, 0)))
            _write(path, stored)
        self.paid_again += [entry.event for entry in earlier[1:]]
        return stored["values"][name].numpy()

    @property
    def _seconds(self) -> float:
        return self.seconds + time.monotonic() - self._start

    def _keep(self, step: int) -> None:
        """Keep the state after `step` steps for a replay, with the key, beyond the end of the run.

        States of later steps belong to a process that was killed.
        """
        folder, ema = self.folder / SECRET / REPLAY, self.loop.ema
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.glob("*.pt"):
            if int(path.stem) > step:
                path.unlink()
        state = {
            "private": replay_state(self.private),
            "model": self.loop.model.state_dict(),
            "optimizer": self.loop.optimizer.state_dict(),
            "ema": None if ema is None else ema.state_dict(),
            "noise": self.noise,
            "digest": digest_of(self.dataset),
            "init": self.init,
            "summaries": self.summaries,
            "also": [event.to_dict() for event in self.loop.also],
        }
        _write(folder / f"{step:09d}.pt", state)

    def state_dict(self) -> dict[str, Any]:  # Any: numbers and rows of metrics
        """Return what the checkpoint has to hold besides the run of `make_private`."""
        own = {"init": self.init, "noise": self.noise, "metrics": self.metrics}
        return own | {"resumed": self.resumed, "seconds": self._seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as `state_dict` gives it
        """Continue from a `state_dict()`."""
        self.metrics, self.seconds = list(state["metrics"]), state["seconds"]
        self.resumed = state["resumed"] + (not self.is_handed_over)

    def _read_checkpoint(self) -> Mapping[str, Any] | None:  # Any: as `state_dict` gives it
        """Return this session's part of the checkpoint of an interrupted run; None for a new run.

        Raises if the folder's ledger has payments of a run, and there is no checkpoint to go on
        from.
        """
        (self.folder / SECRET).mkdir(mode=0o700, exist_ok=True)
        if self._checkpoint.is_file():
            return torch.load(self._checkpoint, weights_only=True, mmap=True)["run"]
        if self.recipe.privacy.ledger:  # shared with other runs, whose payments it holds too
            return None
        # The check of a table, whose result is stored, is paid before the first checkpoint.
        history = self.ledger.history()
        paid = {entry.kind for entry in history if entry.id not in self.ledger.used}
        if "plan" in paid or (paid and not (self.folder / SECRET / FEATURES).is_file()):
            raise ValueError(
                f"{self.folder.path} holds payments of a run but no checkpoint to resume it from. "
                "Choose another folder with --out."
            )
        return None


def _write(path: Path, state: Mapping[str, Any]) -> None:  # Any: tensors and numbers
    with whole_file(path, mode=0o600) as stream:
        torch.save(state, stream)


def take_folder(folder: RunFolder, recipe: Recipe, *, verb: str = "train") -> None:
    """Write the recipe into an empty folder; raise if the folder holds anything but this run."""
    folder.refuse_other_recipe(recipe, resume=f"tacit {verb} {folder / RECIPE}")
    folder.refuse_foreign_files()
    folder.write(RECIPE, recipe.to_toml())


def _filled(recipe: Recipe, dataset: Dataset) -> Recipe:
    """Return the recipe with its defaults replaced by their values for this data set."""
    if recipe.training.bands != "auto":
        return recipe.filled(dataset.n_records)
    shape = shape_of(recipe.features, dataset.x_train.shape[1:])
    model = models.build(recipe.model, shape, dataset.n_classes, seed=0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    one = replace(recipe, training=replace(recipe.training, bands=1)).filled(dataset.n_records)
    planned = (*check_plan(one, dataset.flags), *_evaluation_plan(one, dataset))
    return recipe.filled(dataset.n_records, planned, parameters=trained)


def _evaluation_plan(recipe: Recipe, dataset: Dataset) -> tuple[PureDP, ...]:
    """Return what the paid evaluation may cost at most: one event, or none if nothing is paid."""
    if dataset.is_test_public or recipe.data.evaluation == "none":
        return ()
    return (PureDP(recipe.data.evaluation_share * recipe.privacy.budget.epsilon),)


def _public_tests(recipe: Recipe, dataset: Dataset) -> tuple[str, ...]:
    if not dataset.is_test_public:
        return ()
    return ("the file of test records",) if recipe.data.public_test else ("the test records",)


def _budget(recipe: Recipe, dataset: Dataset) -> Budget | None:
    """Return the budget of the ledger that belongs to this run alone, or None if it has none.

    With paid features, or for a private table that is checked and evaluated, the run has several
    ledger entries, all fixed in advance: the noise is calibrated to their sum before the first
    payment. A budget would price the later entries as if they were chosen adaptively, so the ledger
    then has none. A run with `shrink` is above its budget on purpose.
    """
    has_parts = dataset.flags or summaries_of(recipe.features, 1)
    if recipe.privacy.ledger or recipe.training.shrink > 1 or has_parts:
        return None
    return recipe.privacy.budget


def replay_steps(stretches: int | None, steps: int) -> set[int]:
    """Return the numbers of steps after which the state of a run is kept for a replay."""
    return {round(k * steps / stretches) for k in range(stretches + 1)} if stretches else set()


def digest_of(dataset: Dataset) -> str:
    """Return a hash of the training records, to detect a change on resuming. Private."""
    found = hashlib.sha256()
    for part in (dataset.x_train, dataset.y_train):
        found.update(np.ascontiguousarray(part).data)
    if dataset.persons is not None:
        found.update(repr(dataset.persons.ids).encode())
    return found.hexdigest()


def _utility(
    recipe: Recipe,
    dataset: Dataset,
    metrics: SequenceOf[Metric],
    baseline: SequenceOf[Metric],
    paid: PaidScores | None,
) -> Utility:
    seed, last = recipe.run.seed, metrics[-1] if paid is None else paid.values
    others = {name: last[name] for name in ("loss", "auc") if name in last}
    twin = baseline[-1] if baseline else {}
    others |= {f"baseline_{name}": twin[name] for name in ("loss", "auc") if name in twin}
    is_measured = "accuracy" in last
    return Utility(
        metric="accuracy",
        private=(SeedValue(seed=seed, value=last["accuracy"]),) if is_measured else (),
        non_private=(SeedValue(seed=seed, value=twin["accuracy"]),) if twin else (),
        majority=majority_share(dataset.y_test) if dataset.is_test_public else last.get(COMMONEST),
        others=others,
        n_test=dataset.n_held_out if is_measured else 0,
        intervals={} if paid is None else paid.intervals,
    )
