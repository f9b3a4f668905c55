"""The setup of an audit of DP-SGD: the user's model, data, settings and loop; its releases."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from tacit._arrays import Floats
from tacit._check import one_of
from tacit.events import BandedGaussian, Event
from tacit.ledger import Budget, Ledger
from tacit.sampling import Stream

Loss = Callable[..., Any]
How = Literal["step", "backward", "resumed"]
Public = dict[str, Any]
"""The public numbers of a step, `private.info`."""
_OWN = ("ledger", "seed", "callbacks")  # settings that every run of an audit gets anew
PLANNED = ("epochs", "steps", "epsilon", "delta", "noise_multiplier", "also")


class Releases(NamedTuple):
    """A finished run of an audit: each release as a row, the public facts of each, the sizes."""

    run: Any
    values: Floats  # (steps, coordinates)
    facts: list[Public]
    names: list[str]
    sizes: list[int]


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """What is audited: everything that the user passes to `make_private`, and how steps are taken.

    `settings` are the keyword arguments of `make_private` apart from the model, the optimizer, the
    data set and the loss. `how` names the loop: `private.step`, a loop of the user's own with
    `private.backward`, or one that is saved and resumed in the middle.
    """

    make_private: Callable[..., Any]
    model: Any
    dataset: Any
    loss_fn: Loss
    settings: Mapping[str, Any]
    how: How = "step"

    def __post_init__(self) -> None:
        one_of(("step", "backward", "resumed"), how=self.how)
        if self.how == "resumed" and self.settings.get("noise") is not None:
            raise ValueError(
                "how='resumed' is for independent noise: with correlated noise, a restart begins a "
                "run of its own, which how='step' tests."
            )

    def run(self, model: Any, **changes: Any) -> Any:  # Any: a run of `make_private`
        """Return a run on `model` with the settings, changed as said. Its parameters do not move.

        The length and the noise of the run have to be given in `changes`.
        """
        import torch

        left_out = (*PLANNED, *_OWN)
        kept = {name: value for name, value in self.settings.items() if name not in left_out}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        changed = {**kept, "check": False, **changes}
        if isinstance(stream := changed.get("sampler"), Stream):  # as long as the runs of an audit
            passes = -(-(changed.get("steps") or 1) // max(1, len(stream.order)))
            changed["sampler"] = replace(stream, order=[*stream.order] * passes)
        is_user = changed.get("users") is not None
        changed.setdefault("ledger", self.new_ledger(is_user=is_user))
        dataset, loss_fn = changed.pop("dataset"), changed.pop("loss_fn")
        return self.make_private(model, optimizer, dataset, loss_fn, **changed)

    def new_ledger(self, budget: Budget | None = None, *, is_user: bool | None = None) -> Ledger:
        """Return an empty ledger in memory, under the relation and unit of the user's run."""
        given = self.settings.get("ledger")
        options = {} if given is None else {"relation": given.relation}
        is_user = self.settings.get("users") is not None if is_user is None else is_user
        return Ledger(budget=budget, unit="user" if is_user else "record", **options)

    def releases(self, **changes: Any) -> Releases:
        """Train a copy of the model, and return every release: what a step leaves in `p.grad`.

        `changes` replace `model`, `dataset`, `loss_fn` or settings.
        """
        model = copy.deepcopy(changes.pop("model", self.model))
        changes = {"dataset": self.dataset, "loss_fn": self.loss_fn, **changes}
        if self.how == "resumed":
            changes.setdefault("ledger", self.new_ledger())
        run, seen, facts = self.run(model, **changes), [], []
        is_halved = self.how == "resumed" and run.steps > 1
        for stop in (run.steps // 2, run.steps) if is_halved else (run.steps,):
            if run.steps_taken:
                saved, model = of_first_rank(run.state_dict()), copy.deepcopy(model)
                run = self.run(model, **changes)
                run.load_state_dict(saved)
            for public in self._loop(run, model, changes["loss_fn"], stop):
                seen.append(_gradient(model))
                facts.append(public)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sizes = [p.numel() for p in named.values()]
        return Releases(run, np.array(seen), facts, list(named), sizes)

    def _loop(self, run: Any, model: Any, loss_fn: Loss, stop: int) -> Iterator[Public]:
        """Take the steps of `run` up to `stop`, and yield the public facts of each after it."""
        public = run.info
        for batch in run.batches() if self.how == "backward" else run:
            if self.how == "backward":
                run.backward(loss_fn(model, batch))
            else:
                run.step(batch)
            if run.steps_taken > public["step"]:
                yield public
                public = run.info
            if run.steps_taken >= stop:
                return

    def scales(self, public: Public, names: list[str], sizes: list[int]) -> Floats:
        """Return how far one record may move each coordinate of a release, as billed.

        Divided by these scales, the release moves by at most 1 in L2 norm, and its noise has the
        billed noise multiplier as standard deviation (`tacit.training.clip` has the proof).
        """
        rule, norms = self.settings["clip_norm"], tuple(public["clip_norms"])
        each: dict[str, float] = dict.fromkeys(names, float(norms[0]))
        if len(norms) > 1:
            now = replace(rule, clip_norms=norms)
            for group, scale in zip(now.groups(names), now.noise_scales, strict=True):
                each |= dict.fromkeys(group, scale)
        per_name = [each[name] for name in names]
        return np.repeat(per_name, sizes) / float(public["expected_batch"])

    def standardized(self, releases: Releases) -> Floats:
        """Return releases divided by the standard deviation that their noise is billed with.

        Of a run with correlated noise, these are the releases C g + z of its event, made from the
        gradients C^-1 (C g + z).
        """
        factor = releases.run.arithmetic.noise_factor
        names, sizes = releases.names, releases.sizes
        stds = [
            self.scales(public, names, sizes)
            * (public["noise_multiplier"] * factor * public.get("gradient_factor", 1.0))
            for public in releases.facts
        ]
        return _mixed(releases.values / np.array(stds), releases.run.training_event)


def of_first_rank(value: Any) -> Any:
    """Return `value` as the first rank has it: there is one key and one checkpoint for all."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    given = [value]
    torch.distributed.broadcast_object_list(given)
    return given[0]


def _gradient(model: Any) -> Floats:
    parts = [
        p.grad.detach().double().reshape(-1).cpu().numpy()
        for p in model.parameters()
        if p.requires_grad
    ]
    return np.concatenate(parts)


def _mixed(values: Floats, event: Event) -> Floats:
    """Return `values`, of one row for each step, mixed over time by the column of `event`."""
    if not isinstance(event, BandedGaussian):
        return values
    found = np.zeros_like(values)
    for lag, weight in enumerate(event.column[: len(values)]):
        found[lag:] += weight * values[: len(values) - lag]
    return found
