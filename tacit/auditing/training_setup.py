"""The setup of an audit of DP-SGD: the user's model, data, settings and loop; its releases."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np

from tacit._arrays import Floats
from tacit._check import one_of
from tacit.auditing.simulated_price import gaussian_of
from tacit.auditing.trainee import Trainee
from tacit.events import BandedGaussian, Event
from tacit.ledger import Budget, Ledger
from tacit.sampling import Stream

Loss = Callable[..., Any]
How = Literal["step", "backward", "resumed"]
Public = dict[str, Any]
"""The public numbers of a step, `private.info`."""
_OWN = ("ledger", "seed")  # settings that every run of an audit gets anew
PLANNED = ("epochs", "steps", "epsilon", "delta", "noise_multiplier", "also")


class Releases(NamedTuple):
    """A finished run of an audit: each release as a row, the public facts of each, the sizes.

    If the run releases its loss, that is the last coordinate, of a size of its own.
    """

    run: Any
    values: Floats  # (steps, coordinates)
    facts: list[Public]
    names: list[str]  # of the tensors of the gradient
    sizes: list[int]
    trainee: Trainee


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """What is audited: everything that the user passes to `make_private`, and how steps are taken.

    `settings` are the keyword arguments of `make_private` apart from the model, the optimizer, the
    data set and the loss. `how` names the loop: `private.step`, a loop of the user's own with
    `private.backward`, or one that is saved and resumed in the middle. An audit makes many runs:
    `speed=Speed(check=False)` saves the comparison with `loss_fn` in each.

    `optimizer` makes the user's optimizer from a list of parameters (default SGD with momentum),
    and `average` makes the average of weights that is released, such as `EMA`, from a model
    (default none).
    """

    make_private: Callable[..., Any]
    model: Any
    dataset: Any
    loss_fn: Loss
    settings: Mapping[str, Any]
    how: How = "step"
    optimizer: Callable[[list[Any]], Any] | None = None  # Any: parameters, and a torch optimizer
    average: Callable[[Any], Any] | None = None  # Any: a model, and an object like `EMA`

    def __post_init__(self) -> None:
        one_of(("step", "backward", "resumed"), how=self.how)
        if self.how == "resumed" and self.banded is not None:
            raise ValueError(
                "how='resumed' is for independent noise: with correlated noise, a restart begins a "
                "run of its own, which how='step' tests."
            )

    @property
    def rule(self) -> Any:  # Any: a number or a clip rule
        """The clip norm or clip rule of the first step."""
        return getattr(self.settings["clip_norm"], "start", self.settings["clip_norm"])

    @property
    def adaptive(self) -> Any:  # Any: an `AdaptiveClip`, or None
        """The settings of adaptive clipping; None without it."""
        given = self.settings["clip_norm"]
        return given if hasattr(given, "quantile") else None

    @property
    def sampler(self) -> Any:  # Any: a sampler of `tacit.sampling`, or None
        """The sampler of lots, if one is given in place of their size."""
        given = self.settings["batch_size"]
        return None if isinstance(given, Integral) else given

    @property
    def banded(self) -> Any:  # Any: a `Banded`, or None
        """The settings of correlated noise; None for independent noise."""
        return getattr(self.settings.get("noise"), "correlated", self.settings.get("noise"))

    @property
    def noisy_loss(self) -> Any:  # Any: a `NoisyLoss`, or None
        """How losses are released; None if they are not."""
        return getattr(self.settings.get("reports"), "noisy_loss", None)

    def noise_with(self, **changes: Any) -> Any:  # Any: a `Noise`, a `Banded`, or None
        """Return the option `noise` with some fields of a `Noise` changed."""
        given: Any = self.settings.get("noise")
        is_whole = hasattr(given, "correlated")
        return replace(given, **changes) if is_whole else changes.get("correlated", given)

    def trainee(self, model: Any = None, *, is_moving: bool = False) -> Trainee:
        """Return a copy of the model, or of `model`, for one run.

        If it `is_moving`, it has the user's optimizer and average; else no step changes its
        weights, so that the same records give the same gradient in every step.
        """
        copied = copy.deepcopy(self.model if model is None else model)
        if not is_moving:
            return Trainee(copied, lambda parameters: _sgd(parameters, 0.0))
        return Trainee(copied, self.optimizer or _sgd, self.average, is_noted=True)

    def run(self, trainee: Trainee, **changes: Any) -> Any:  # Any: a run of `make_private`
        """Return a run of `trainee` with the settings, changed as said.

        The length and the noise of the run have to be given in `changes`.
        """
        left_out = (*PLANNED, *_OWN)
        kept = {name: value for name, value in self.settings.items() if name not in left_out}
        changed = {"dataset": self.dataset, "loss_fn": self.loss_fn, **kept, **changes}
        if isinstance(stream := changed["batch_size"], Stream):  # as long as the runs of an audit
            passes = -(-(changed.get("steps") or 1) // max(1, len(stream.order)))
            changed["batch_size"] = replace(stream, order=[*stream.order] * passes)
        if (reports := changed.get("reports")) is not None:  # the user's callbacks see no audit
            changed["reports"] = replace(reports, callbacks=())
        is_user = changed.get("users") is not None
        changed.setdefault("ledger", self.new_ledger(is_user=is_user))
        dataset, loss_fn = changed.pop("dataset"), changed.pop("loss_fn")
        return self.make_private(trainee.model, trainee.optimizer, dataset, loss_fn, **changed)

    def silent(self) -> dict[str, Any]:  # Any: a loss and settings
        """Return the changes with which a run releases noise alone, because losses are zero.

        A released loss is then centered at zero: away from the middle of their range, losses add.
        """
        changes: dict[str, Any] = {"loss_fn": lambda m, batch: self.loss_fn(m, batch) * 0.0}
        if (loss := self.noisy_loss) is not None:
            half = (loss.upper - loss.lower) / 2
            centered = replace(loss, lower=-half, upper=half)
            changes["reports"] = replace(self.settings["reports"], noisy_loss=centered)
        return changes

    def new_ledger(self, budget: Budget | None = None, *, is_user: bool | None = None) -> Ledger:
        """Return an empty ledger in memory, under the relation and unit of the user's run."""
        given = self.settings.get("ledger")
        options = {} if given is None else {"relation": given.relation}
        is_user = self.settings.get("users") is not None if is_user is None else is_user
        return Ledger(budget=budget, unit="user" if is_user else "record", **options)

    def releases(self, model: Any = None, *, is_moving: bool = False, **changes: Any) -> Releases:
        """Train a copy of the model, and return every release: `p.grad`, and the noisy loss.

        `changes` replace `dataset`, `loss_fn` or settings; see `trainee` for the others.
        """
        trainee = self.trainee(model, is_moving=is_moving)
        run, seen, facts = self.run(trainee, **changes), [], []
        is_halved = self.how == "resumed" and run.steps > 1
        for stop in (run.steps // 2, run.steps) if is_halved else (run.steps,):
            if run.steps_taken:
                saved, before = of_first_rank(run.state_dict()), trainee
                trainee = self.trainee(model, is_moving=is_moving)
                trainee.resume(before)
                run = self.run(trainee, **changes | {"ledger": run.ledger})
                run.load_state_dict(saved)
            for public in self.steps_of(run, trainee, stop):
                seen.append(np.append(trainee.gradient, run.noisy_losses[-1:]))
                facts.append(public)
        named = {name: p for name, p in trainee.model.named_parameters() if p.requires_grad}
        sizes = [*(p.numel() for p in named.values()), *[1] * bool(run.noisy_losses)]
        return Releases(run, np.array(seen), facts, list(named), sizes, trainee)

    def steps_of(self, run: Any, trainee: Trainee, stop: int) -> Iterator[Public]:
        """Take the steps of `run` up to `stop`, and yield the public facts of each after it."""
        public = run.info
        for lot in run:
            if self.how == "backward":
                run.backward()
                trainee.optimizer.step()
            else:
                run.step(lot)
            trainee.end_step()
            yield public
            public = run.info
            if run.steps_taken >= stop:
                return

    def scales(self, releases: Releases, public: Public) -> Floats:
        """Return how far one record may move each coordinate of a release, as billed.

        Divided by these scales, the release moves by at most 1 in L2 norm, and its noise has the
        billed noise multiplier as standard deviation (`tacit.training.clip` has the proof, and
        `tacit.training.noisy_loss` that for a gradient and a loss).
        """
        rule, norms = self.rule, tuple(public["clip_norms"])
        names, sizes = releases.names, releases.sizes
        each: dict[str, float] = dict.fromkeys(names, float(norms[0]))
        if len(norms) > 1:
            now = replace(rule, clip_norms=norms)
            for group, scale in zip(now.groups(names), now.noise_scales, strict=True):
                each |= dict.fromkeys(group, scale)
        scales = np.repeat([each[name] for name in names], sizes[: len(names)])
        if (loss := self.noisy_loss) is not None and len(sizes) > len(names):
            unit = _correlation(releases.run.training_event) * (loss.upper - loss.lower) / 2
            scales = np.append(scales / (1 - loss.share) ** 0.5, unit / loss.share**0.5)
        return scales / float(public["expected_batch"])

    def standardized(self, releases: Releases) -> Floats:
        """Return releases divided by the standard deviation that their noise is billed with.

        Of a run with correlated noise, these are the releases C g + z of its event, made from the
        gradients C^-1 (C g + z). The noise of losses is independent in any case.
        """
        factor = releases.run.arithmetic.noise_factor
        stds = [
            self.scales(releases, public) * public["noise_multiplier"] * factor
            for public in releases.facts
        ]
        values, width = releases.values / np.array(stds), sum(releases.sizes[: len(releases.names)])
        gradients = _mixed(values[:, :width], releases.run.training_event)
        return np.hstack([gradients, values[:, width:]])


def _sgd(parameters: list[Any], rate: float = 0.01) -> Any:  # Any: torch's types
    import torch

    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def of_first_rank(value: Any) -> Any:
    """Return `value` as the first rank has it: there is one key and one checkpoint for all."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    given = [value]
    torch.distributed.broadcast_object_list(given)
    return given[0]


def _correlation(event: Event) -> float:
    """Return what the noise of a loss is multiplied by, beside gradients whose noise is correlated.

    It is sqrt(k) / M, where a record moves k losses by 1 each, and all gradients together by M.
    """
    if not isinstance(event, BandedGaussian):
        return 1.0
    together, each = event.equivalent, replace(event, column=(1.0,)).equivalent
    return gaussian_of(together).noise_multiplier / gaussian_of(each).noise_multiplier


def _mixed(values: Floats, event: Event) -> Floats:
    """Return `values`, of one row for each step, mixed over time by the column of `event`."""
    if not isinstance(event, BandedGaussian):
        return values
    found = np.zeros_like(values)
    for lag, weight in enumerate(event.column[: len(values)]):
        found[lag:] += weight * values[: len(values) - lag]
    return found
