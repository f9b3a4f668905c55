"""Many runs of one recipe: every epsilon with every delta and seed, in parallel, resumable.

    runs/mnist-sweep/
    ├── sweep.json          a row per run, a summary per (epsilon, delta), the price of all
    ├── sweep.toml          the recipe, without what the sweep varies
    ├── baseline.jsonl      the non-private twin, trained once; empty if the records are private
    └── epsilon-3_delta-1e-05_run-0/    a run folder, see `tacit.experiments.run`

Each run has its own bill, which holds if that run alone is released. Whoever publishes all of them
pays for all: `Sweep.epsilon_of_all`.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tacit import accounting
from tacit.errors import NotCertified
from tacit.events import Event, Relation
from tacit.events import Sequence as EventSequence
from tacit.experiments import data
from tacit.experiments.baseline import train_baseline
from tacit.experiments.features import cache_folder
from tacit.experiments.recipe import Recipe
from tacit.experiments.run import BASELINE, FACTS, Facts, Metric, RunFolder, write_whole
from tacit.experiments.settings import Published
from tacit.experiments.train import train

SWEEP, GIVEN = "sweep.json", "sweep.toml"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep, and what came of it."""

    folder: str
    epsilon: float
    """What was asked for; `spent` is what it cost."""
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
    """The runs that differ in their randomness alone."""

    epsilon: float
    delta: float
    runs: int
    accuracy: float
    """Mean over runs."""
    spread: float | None
    """Standard deviation over runs; None for one."""
    auc: float | None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All runs, in order of delta, epsilon, seed."""

    name: str
    cells: tuple[Cell, ...]
    summaries: tuple[Summary, ...]
    baseline: Metric | None
    """Last metrics of the non-private twin."""
    majority: float | None
    epsilon_of_all: float
    """Price, at the smallest delta, of releasing every run."""
    published: tuple[Published, ...] = ()
    """The recipe's, to compare with."""

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Sweep":
        """The finished sweep in a folder."""
        path = Path(folder) / SWEEP
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no finished sweep ({SWEEP} is missing).")
        given = json.loads(path.read_text(encoding="utf-8"))
        cells = tuple(Cell(**cell) for cell in given.pop("cells"))
        summaries = tuple(Summary(**summary) for summary in given.pop("summaries"))
        published = tuple(Published(**point) for point in given.pop("published"))
        return cls(cells=cells, summaries=summaries, published=published, **given)


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
    on_run: Callable[[Facts], None] | None = None,
) -> Sweep:
    """Every run of the grid; those that are finished in `path` are kept, others go on.

    With a seed in the recipe, repeat k has seed + k; without, each draws fresh entropy.
    """
    folder, cache = RunFolder(path), cache or cache_folder()
    cells = _grid(recipe, epsilons, deltas, repeats)
    if not cells:
        raise ValueError("a sweep needs at least one epsilon.")
    dataset = data.load(recipe.data, root)
    _take(folder, recipe)
    if not (folder / BASELINE).is_file():
        rows = train_baseline(recipe, dataset, cache, seed=recipe.run.seed or 0)
        folder.write_lines(BASELINE, rows)
    baseline = folder.read_lines(BASELINE)
    facts: dict[str, Facts] = {}
    work = [(name, one, folder / name, root, cache, baseline) for name, one in cells.items()]
    for name, found in _all(work, jobs):
        facts[name] = found
        if on_run is not None:
            on_run(found)
    facts = _with_siblings(folder, {name: facts[name] for name in cells})
    result = _result(recipe, facts, baseline)
    folder.write(SWEEP, json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n")
    return result


def _take(folder: RunFolder, recipe: Recipe) -> None:
    """Make the folder this recipe's, or raise: a twin of other settings must not be shown."""
    privacy = replace(recipe.privacy, epsilon=1.0, delta=None)
    text = replace(recipe, privacy=privacy, published=()).to_toml()
    path = folder / GIVEN
    if not path.is_file():
        (folder / BASELINE).unlink(missing_ok=True)  # of nobody knows what
        folder.write(GIVEN, text)
    elif path.read_text(encoding="utf-8") != text:
        raise ValueError(
            f"{folder.path} holds a sweep of another recipe. Choose another folder with --out."
        )


def _grid(
    recipe: Recipe, epsilons: Sequence[float], deltas: Sequence[float], repeats: int
) -> dict[str, Recipe]:
    cells: dict[str, Recipe] = {}
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
                cells[f"epsilon-{epsilon:g}{at}_run-{k}"] = one
    return cells


Work = tuple[str, Recipe, Path, str | Path | None, Path, list[Metric]]


def _all(work: list[Work], jobs: int) -> Iterator[tuple[str, Facts]]:
    if jobs == 1:
        yield from map(_one, work)
        return
    from joblib import Parallel, delayed

    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = Parallel(n_jobs=jobs, return_as="generator_unordered")
    for found in pool(delayed(_one)(item, threads) for item in work):
        assert found is not None  # joblib's types allow for tasks that give nothing
        yield found


def _one(item: Work, threads: int | None = None) -> tuple[str, Facts]:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    name, recipe, path, root, cache, baseline = item
    return name, train(recipe, path, root=root, cache=cache, baseline=baseline)


def _with_siblings(folder: RunFolder, facts: dict[str, Facts]) -> dict[str, Facts]:
    """Each run's facts with the accuracies of the runs that differ in their randomness alone."""
    updated = {}
    for name, own in facts.items():
        others = [
            other.utility.private[0]
            for key, other in facts.items()
            if key != name and _key(other) == _key(own)
        ]
        utility = replace(own.utility, private=(own.utility.private[0], *others))
        updated[name] = replace(own, utility=utility)
        if updated[name] != own:
            content = json.dumps(updated[name].to_dict(), indent=2) + "\n"
            write_whole(folder / name / FACTS, content)
    return updated


def _key(facts: Facts) -> tuple[float, float]:
    assert facts.epsilon_target is not None  # recipes always have one
    return facts.epsilon_target, facts.delta


def _result(recipe: Recipe, facts: dict[str, Facts], baseline: list[Metric]) -> Sweep:
    cells = [_cell(name, one) for name, one in facts.items()]
    summaries = []
    for epsilon, delta in dict.fromkeys(_key(one) for one in facts.values()):
        group = [one for one in facts.values() if _key(one) == (epsilon, delta)]
        aucs = [one.utility.others["auc"] for one in group if "auc" in one.utility.others]
        summaries.append(
            Summary(
                epsilon=epsilon,
                delta=delta,
                runs=len(group),
                accuracy=group[0].utility.mean,
                spread=group[0].utility.spread,
                auc=sum(aucs) / len(aucs) if aucs else None,
            )
        )
    first = next(iter(facts.values()))
    return Sweep(
        name=recipe.name,
        cells=tuple(cells),
        summaries=tuple(summaries),
        baseline=baseline[-1] if baseline else None,
        majority=first.utility.majority,
        epsilon_of_all=_price_of_all([one.claim for one in facts.values()], facts),
        published=recipe.published,
    )


def _cell(name: str, facts: Facts) -> Cell:
    epsilon, delta = _key(facts)
    others = facts.utility.others
    return Cell(
        folder=name,
        epsilon=epsilon,
        delta=delta,
        seed=facts.seed if isinstance(facts.seed, int) else None,
        spent=facts.epsilon,
        accuracy=facts.utility.private[0].value,
        loss=others.get("loss"),
        auc=others.get("auc"),
        steps=facts.steps,
        seconds=facts.seconds,
    )


def _price_of_all(events: list[Event], facts: dict[str, Facts]) -> float:
    delta = min(one.delta for one in facts.values())
    relation = Relation(next(iter(facts.values())).relation)
    event = events[0] if len(events) == 1 else EventSequence(tuple(events))
    try:
        return accounting.epsilon(event, delta=delta, relation=relation)
    except NotCertified:  # too many unlike parts for double precision: Rényi always answers
        return accounting.RDP().epsilon(event, delta=delta, relation=relation)
