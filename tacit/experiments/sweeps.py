"""Sweeps: one recipe at several epsilons and deltas, or a PATE recipe with one setting varied.

    runs/mnist-sweep/
    ├── sweep.json          a row per run, a summary per (epsilon, delta), the price of all runs
    ├── sweep.toml          the recipe, without the settings that the sweep varies
    ├── baseline.jsonl      the non-private twin, trained once; empty if the records are private
    └── epsilon-3_delta-1e-05_run-0/    a run folder, see `tacit.experiments.folder`

Each run has a folder and, by default, a ledger of its own. Its stated cost holds if that run alone
is released. On one private data set the costs of several released runs add up:
`Sweep.epsilon_of_all` is the cost of releasing all of them.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tacit import accounting
from tacit._check import one_of
from tacit._untrusted import read_json
from tacit.datasets import Dataset
from tacit.errors import NotCertified
from tacit.events import Event, Relation, Repeated
from tacit.events import Sequence as EventSequence
from tacit.experiments import data
from tacit.experiments.facts import BASELINE, Facts, Metric
from tacit.experiments.features import cache_folder
from tacit.experiments.folder import RunFolder
from tacit.experiments.pate_run import refuse_other_recipe, run_pate
from tacit.experiments.recipe import Published, Recipe

if TYPE_CHECKING:
    from tacit.experiments.training_run import PaidRun

SWEEP = "sweep.json"
"""File of a finished sweep, in its folder."""
GIVEN = "sweep.toml"
_MOST_BYTES = 64 * 2**20  # of sweep.json
VARIED = {"teachers": "teachers.count", "noise": "answers.noise", "queries": "answers.queries"}


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep: its settings, its cost and its result."""

    folder: str
    epsilon: float
    """The epsilon of the recipe; `spent` is what the run cost."""
    delta: float
    seed: int | None
    spent: float
    accuracy: float
    loss: float | None
    auc: float | None
    steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Mean result of the runs of a sweep that have the same epsilon and delta."""

    epsilon: float
    delta: float
    runs: int
    accuracy: float
    """Mean over runs."""
    spread: float | None
    """Standard deviation over runs; None for one run."""
    auc: float | None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All runs of a sweep, ordered by delta, then epsilon, then seed."""

    name: str
    cells: tuple[SweepRun, ...]
    summaries: tuple[Summary, ...]
    baseline: Metric | None
    """Last metrics of the non-private twin."""
    majority: float | None
    epsilon_of_all: float
    """Cost, at the smallest delta, of releasing every run."""
    published: tuple[Published, ...] = ()
    """Published results of the recipe, to compare with."""

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Sweep":
        """Return the finished sweep in a folder, from its sweep.json."""
        path = Path(folder) / SWEEP
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no finished sweep ({SWEEP} is missing).")
        given = read_json(path, most_bytes=_MOST_BYTES)
        cells = tuple(SweepRun(**cell) for cell in given.pop("cells"))
        summaries = tuple(Summary(**summary) for summary in given.pop("summaries"))
        published = tuple(Published(**point) for point in given.pop("published"))
        return cls(cells=cells, summaries=summaries, published=published, **given)


class Point(NamedTuple):
    """Accuracy and epsilon of a PATE run at one value of the varied setting."""

    value: float
    accuracy: float
    epsilon: float
    answered: int
    run: int = 0
    """Number of the run among those with this value, from 0."""


def sweep(
    recipe: Recipe,
    path: str | os.PathLike[str],
    *,
    epsilons: Sequence[float],
    deltas: Sequence[float] = (),
    repeats: int = 1,
    jobs: int = 1,
    root: str | Path | None = None,
    cache: Path | None = None,
    on_run: Callable[[Facts], None] = lambda _: None,
) -> Sweep:
    """Train the recipe at every epsilon and delta, `repeats` times each.

    Runs that are finished in folder `path` are kept, and unfinished ones are resumed. If the recipe
    has a seed, repeat k uses seed + k; otherwise each run draws fresh randomness.
    """
    folder, cache = RunFolder(path), cache or cache_folder()
    recipes = _grid(recipe, epsilons, deltas, repeats)
    if not recipes:
        raise ValueError("a sweep needs at least one epsilon.")
    if recipe.data.evaluation == "none":
        raise ValueError('a sweep compares accuracies: leave out data.evaluation = "none".')
    dataset = data.load(recipe.data, root, takes_persons=True)
    with folder.locked():
        return _sweep(recipe, recipes, folder, dataset, root, cache, jobs, on_run)


def _sweep(
    recipe: Recipe,
    recipes: dict[str, Recipe],
    folder: RunFolder,
    dataset: Dataset,
    root: str | Path | None,
    cache: Path,
    jobs: int,
    on_run: Callable[[Facts], None],
) -> Sweep:
    """Do what `sweep` says, while this process holds the folder."""
    from tacit.experiments.training_loop import train_baseline

    _take(folder, recipe)
    if not (folder / BASELINE).is_file():
        rows = train_baseline(recipe, dataset, cache, seed=recipe.run.seed or 0)
        folder.write_lines(BASELINE, rows)
    baseline = folder.read_lines(BASELINE)
    work = [(one, folder / name, root, cache, baseline) for name, one in recipes.items()]
    for found in _train_all(work, jobs):
        on_run(found)
    facts = _with_siblings(folder, {name: RunFolder(folder / name).facts() for name in recipes})
    result = _result(recipe, facts, baseline)
    folder.write(SWEEP, json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n")
    return result


def sweep_pate(
    recipe: Recipe,
    setting: str,
    values: Sequence[float],
    folder: str | Path,
    *,
    repeats: int = 1,
    data: str | Path | None = None,
    ledger: str | Path | None = None,
    on_point: Callable[[Point], None] = lambda _: None,
) -> list[Point]:
    """Run a PATE recipe at each of `values` of `setting` ("teachers", "noise" or "queries").

    Each value has `repeats` runs; if the recipe has a seed, run k uses seed + k. Writes
    `sweep.jsonl` and `sweep.csv`. A finished run is not repeated. `ledger` is a ledger file that
    pays for all runs.
    """
    one_of(VARIED, setting=setting)
    points = []
    for value, k in product(values, range(repeats)):
        number = value if setting == "noise" else int(value)
        run = RunFolder(Path(folder) / (f"{setting}-{number:g}" + (f"_run-{k}" if k else "")))
        seed = None if recipe.run.seed is None else recipe.run.seed + k
        varied = recipe.with_settings({VARIED[setting]: number, "run.seed": seed})
        refuse_other_recipe(varied, run)
        facts = (
            run.facts() if run.is_finished else run_pate(varied, run.path, data=data, ledger=ledger)
        )
        answered = int(facts.utility.others["answered"])
        accuracy = facts.utility.private[0].value
        points.append(Point(float(number), accuracy, facts.epsilon, answered, k))
        on_point(points[-1])
    written = RunFolder(folder)
    written.write_lines("sweep.jsonl", [{setting: p.value, **p._asdict()} for p in points])
    written.write_table("sweep.csv", (setting, *Point._fields[1:]), points)
    return points


def _take(folder: RunFolder, recipe: Recipe) -> None:
    """Store the recipe in the sweep's folder; raise if the folder holds a sweep of another recipe.

    The folder's non-private twin is shown beside every run, so it must come from the same recipe.
    """
    privacy = replace(recipe.privacy, epsilon=1.0, delta=None)
    common = replace(recipe, privacy=privacy, published=())
    if not (folder / GIVEN).is_file():
        (folder / BASELINE).unlink(missing_ok=True)  # left over from an unknown earlier recipe
        folder.write(GIVEN, common.to_toml())
    elif Recipe.read(folder / GIVEN, trust_code=[common.model.module.partition(":")[0]]) != common:
        raise ValueError(
            f"{folder.path} holds a sweep of another recipe. Choose another folder with --out."
        )


def _grid(
    recipe: Recipe, epsilons: Sequence[float], deltas: Sequence[float], repeats: int
) -> dict[str, Recipe]:
    """Return the recipe of every run of the sweep, by the name of the run's folder."""
    recipes: dict[str, Recipe] = {}
    for delta in deltas or (recipe.privacy.delta,):
        for epsilon in sorted(set(epsilons)):
            for k in range(repeats):
                seed = None if recipe.run.seed is None else recipe.run.seed + k
                one = recipe.for_epsilon(epsilon)
                one = replace(
                    one,
                    published=(),
                    privacy=replace(one.privacy, delta=delta),
                    run=replace(one.run, seed=seed),
                )
                at = "" if delta is None else f"_delta-{delta:g}"
                recipes[f"epsilon-{epsilon:g}{at}_run-{k}"] = one
    return recipes


_Work = tuple[Recipe, Path, str | Path | None, Path, list[Metric]]
"""Recipe and folder of a run, folders of data and cache, and the metrics of the twin."""


def _train_all(work: list[_Work], jobs: int) -> Iterator[Facts]:
    """Train all runs, `jobs` at a time, and yield the facts of each run when it has finished.

    Several at a time: this process pays for all of them before any begins, workers take the steps,
    and this process finishes each run. So no worker uses a ledger.
    """
    from tacit.experiments import training_run as runs

    if jobs == 1:
        for recipe, path, root, cache, twin in work:
            yield runs.train(recipe, path, root=root, cache=cache, baseline=twin)
        return
    from joblib import Parallel, delayed

    paid = [runs.pay_for_run(recipe, path, root=root, cache=cache)
            for recipe, path, root, cache, _ in work]  # fmt: skip
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = Parallel(n_jobs=jobs, return_as="generator_unordered")
    for number in pool(delayed(_take_steps)(run, k, threads) for k, run in enumerate(paid)):
        assert number is not None  # joblib's types allow for tasks without a result
        yield runs.finish_run(paid[number], work[number][-1])


def _take_steps(paid: "PaidRun", number: int, threads: int) -> int:
    import torch

    from tacit.experiments.training_run import take_steps

    torch.set_num_threads(threads)
    take_steps(paid)
    return number


def _with_siblings(folder: RunFolder, facts: dict[str, Facts]) -> dict[str, Facts]:
    """Add to each run's facts the accuracies of runs that differ only in randomness.

    Facts that change are also written to the folder of their run.
    """
    updated = {}
    for name, own in facts.items():
        equal = [one for key, one in facts.items() if key != name and _key(one) == _key(own)]
        private = tuple(one.utility.private[0] for one in (own, *equal))
        updated[name] = replace(own, utility=replace(own.utility, private=private))
        if updated[name] != own:
            run = RunFolder(folder / name)
            with run.locked(), run.reopen_ledger(own) as ledger:
                updated[name] = run.finish(updated[name], ledger)  # seals the new facts
    return updated


def _key(facts: Facts) -> tuple[float, float]:
    """Return the planned (epsilon, delta) of a run, by which repeated runs are grouped."""
    assert facts.epsilon_target is not None  # recipes of DP-SGD always have one
    return facts.epsilon_target, facts.delta


def _result(recipe: Recipe, facts: dict[str, Facts], baseline: list[Metric]) -> Sweep:
    summaries = []
    for epsilon, delta in dict.fromkeys(map(_key, facts.values())):
        group = [one for one in facts.values() if _key(one) == (epsilon, delta)]
        aucs = [one.utility.others["auc"] for one in group if "auc" in one.utility.others]
        summaries.append(
            Summary(
                epsilon=epsilon,
                delta=delta,
                runs=len(group),
                accuracy=group[0].utility.mean or 0.0,
                spread=group[0].utility.spread,
                auc=sum(aucs) / len(aucs) if aucs else None,
            )
        )
    return Sweep(
        name=recipe.name,
        cells=tuple(_cell(name, one) for name, one in facts.items()),
        summaries=tuple(summaries),
        baseline=baseline[-1] if baseline else None,
        majority=next(iter(facts.values())).utility.majority,
        epsilon_of_all=price_of_all(
            [one.claim for one in facts.values()],
            delta=min(one.delta for one in facts.values()),
            relation=Relation(next(iter(facts.values())).relation),
        ),
        published=recipe.published,
    )


def _cell(name: str, facts: Facts) -> SweepRun:
    others = facts.utility.others
    return SweepRun(
        folder=name,
        epsilon=_key(facts)[0],
        delta=facts.delta,
        seed=facts.seed if isinstance(facts.seed, int) else None,
        spent=facts.epsilon,
        accuracy=facts.utility.private[0].value,
        loss=others.get("loss"),
        auc=others.get("auc"),
        steps=facts.steps,
        seconds=facts.seconds,
    )


def price_of_all(
    events: Sequence[Event], *, delta: float, relation: Relation, is_tight: bool = True
) -> float:
    """Return the epsilon of releasing what all `events` produced; unless tight, by RDP alone."""
    counts = Counter(events)
    parts = tuple(Repeated(event, n) for event, n in counts.items())
    event = parts[0] if len(parts) == 1 else EventSequence(parts)
    if is_tight:
        with suppress(NotCertified):  # too many different parts for double precision
            return accounting.epsilon(event, delta=delta, relation=relation)
    return accounting.RDP().epsilon(event, delta=delta, relation=relation)  # always has a bound
