"""Replay of a DP-SGD run: stretches of it are computed again from the records and the key.

A run whose recipe sets `run.stretches` keeps its state at the borders of that many stretches, with
the key of the noise: the one exception to the rule that a key ends with its process. Whoever has
these states and the records can take the steps of a stretch again and must arrive at the next
state, bit for bit on the same kind of machine. The first state must be the model before training,
and the last one must hold the released weights. So if the released weights do not come from this
training, at least one stretch or one of these two ends is wrong, and a random choice of k out of n
stretches finds it with a probability of at least k / n.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tacit import events
from tacit.datasets import Dataset
from tacit.experiments import data, models
from tacit.experiments.facts import RECIPE, REPLAY, SECRET
from tacit.experiments.features import cache_folder, prepare
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import Recipe
from tacit.experiments.released import load_model
from tacit.experiments.training_loop import TrainingLoop, tensors
from tacit.experiments.training_run import digest_of, replay_steps
from tacit.mechanisms import Seed, generator
from tacit.training import load_replay

State = Mapping[str, Any]  # Any: tensors, numbers and the key, as `Session` saved them


class Replayed(NamedTuple):
    """One part of a run that was computed again: what it is, and whether it came out the same."""

    what: str
    is_same: bool


def replay_run(
    path: str | Path,
    *,
    stretches: int = 1,
    root: str | Path | None = None,
    rng: Seed = None,
    trust_code: Collection[str] = (),
) -> tuple[Replayed, ...]:
    """Compute random stretches of the run in folder `path` again, and its two ends.

    Raises ValueError if the run kept no states, or if the records are not those of the run.
    """
    folder = RunFolder(path)
    facts, recipe = folder.facts(), Recipe.read(folder / RECIPE, trust_code=trust_code)
    kept = sorted((folder / SECRET / REPLAY).glob("*.pt"))
    borders = sorted(replay_steps(recipe.run.stretches, facts.steps))
    if not borders or not {*borders} <= {int(file.stem) for file in kept}:
        raise ValueError(
            f"{folder.path} has no states to replay. Set run.stretches in the recipe, train again, "
            "and keep secret/: the states hold the key of the noise."
        )
    borders = [int(file.stem) for file in kept]  # also where the run was interrupted
    dataset = data.load(recipe.data, folder.data_root(root), takes_persons=True)
    last = len(borders) - 1
    chosen = np.argsort(generator(rng).random(last))[: max(1, min(stretches, last))]
    found = [_first(recipe, dataset, _read(kept[0], dataset))]
    for k in sorted(chosen.tolist()):
        start, goal = (_read(file, dataset) for file in kept[k : k + 2])
        is_same = _arrives(_resumed(recipe, dataset, start), borders[k + 1], goal)
        found.append(Replayed(f"steps {borders[k] + 1} to {borders[k + 1]}", is_same))
    with _resumed(recipe, dataset, _read(kept[-1], dataset)).released() as model:
        weights = load_model(folder.path, trust_code=trust_code).model.state_dict()
        found.append(Replayed("the released weights", _is_equal(model.state_dict(), weights)))
    return tuple(found)


def _arrives(loop: TrainingLoop, last: int, goal: State) -> bool:
    """Return whether the loop has the weights of the state `goal` after the step `last`."""
    try:
        for step in loop.steps():
            if step == last:
                break
    except ValueError:  # the state that it started from is not one that a run has saved
        return False
    return _is_equal(loop.model.state_dict(), goal["model"])


def _read(path: Path, dataset: Dataset) -> State:
    """Return a state of the run; it must have been computed from these records."""
    state = torch.load(path, weights_only=True)
    if state["digest"] != digest_of(dataset):
        raise ValueError("these are not the training records of the run. Restore them.")
    return state


def _first(recipe: Recipe, dataset: Dataset, state: State) -> Replayed:
    """Compare the first state with a new model."""
    fresh = _loop(recipe, dataset, state).model.state_dict()
    return Replayed("the model before training", _is_equal(fresh, state["model"]))


def _resumed(recipe: Recipe, dataset: Dataset, state: State) -> TrainingLoop:
    """Return the loop of the run, in `state`. It pays from a ledger in memory."""
    loop = _loop(recipe, dataset, state)
    load_replay(loop.private, state["private"])
    loop.model.load_state_dict(state["model"])
    loop.optimizer.load_state_dict(state["optimizer"])
    if loop.ema is not None:
        loop.ema.load_state_dict(state["ema"])
    return loop


def _loop(recipe: Recipe, dataset: Dataset, state: State) -> TrainingLoop:
    recipe = recipe.filled(dataset.n_records)
    summaries = {name: value.numpy() for name, value in state["summaries"].items()}
    prepared = prepare(
        dataset, recipe.features, release=lambda name, *_: summaries[name], cache=cache_folder()
    )
    return TrainingLoop(
        recipe,
        models.build(recipe.model, prepared.shape, dataset.n_classes, seed=state["init"]),
        tensors(prepared.x_train, prepared.y_train),
        n_records=dataset.n_records,
        noise_multiplier=state["noise"],
        also=tuple(events.from_dict(event) for event in state["also"]),
        seed=recipe.run.seed,
        persons=dataset.persons,
    )


def _is_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
