"""`make_private`: check the arguments and plan a run, which has spent nothing yet."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from tacit import sampling
from tacit._slow import told_if_slow
from tacit.events import Event
from tacit.ledger import Ledger
from tacit.training.adaptive_clipping import AdaptiveClip
from tacit.training.arithmetic import Arithmetic, arithmetic_of, largest_lot
from tacit.training.banded_noise import Banded, BandedNoise
from tacit.training.batch_norm import check_layers, norm_layers, refuse_sparse
from tacit.training.checkpoint import open_checkpoint
from tacit.training.checkpoint_file import Checkpoint
from tacit.training.clip import Clip, ClippedSum, rule_of
from tacit.training.distributed import Ranks, checksum, unwrapped
from tacit.training.ema import TailMean
from tacit.training.epochs import StepReports
from tacit.training.examples import Examples, Views
from tacit.training.foreign import own_optimizer
from tacit.training.key import Key
from tacit.training.lot_sum import LotSum
from tacit.training.lots import Lots
from tacit.training.memory_limit import (
    GPUMeter,
    fitting_rows,
    largest_microbatch,
    starting_limit,
    zero_step,
)
from tacit.training.noise import NoisyMean
from tacit.training.options import Noise, Reports, Speed
from tacit.training.padding import Padding, choose_padding
from tacit.training.plan import Sampler, TrainingPlan, expected_lot, make_plan
from tacit.training.private import Private
from tacit.training.program.pad_to import PadTo
from tacit.training.program.start import Started, start
from tacit.training.records import Records
from tacit.training.schedules import ScheduledClip
from tacit.training.tree import Batch, LossFn, n_rows
from tacit.training.users import Unit, unit_of
from tacit.training.withheld_errors import ErrorGuard

# Runs that may not be over: the ids of their parameters, and their optimizer.
_RUNS: WeakKeyDictionary[Private, tuple[set[int], torch.optim.Optimizer]] = WeakKeyDictionary()


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,  # Any: a Dataset, a DataFrame, a tensor, or a tuple of tensors or arrays
    loss_fn: LossFn,
    *,
    batch_size: int | Sampler,
    clip_norm: float | Clip | AdaptiveClip | ScheduledClip,
    epochs: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    n_records: int | None = None,
    users: Any = None,  # Any: `Users`, a sequence of ids of any library, or the name of a column
    noise: Noise | Banded | None = None,
    reports: Reports | None = None,
    ledger: Ledger | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    also: Event | Sequence[Event] = (),
    seed: int | None = None,
    collate_fn: Callable[[list[Any]], Batch] | None = None,
    augment: Callable[[Batch], Batch] | Views | None = None,
    speed: Speed | None = None,
) -> Private:
    """Plan and check a private run of DP-SGD on `model`. Nothing is paid yet.

    Guarantee: releasing the model after the run and every gradient in it costs `private.event`
    under the ledger's relation, at most (`epsilon`, `delta`) if they are given. This assumes that
    `n_records` is public, and that nothing else computed from the records leaves the program.

    Parameters
    ----------
    dataset
        Map-style `Dataset`, tensor, tuple of tensors or numpy arrays, or DataFrame (a batch then
        maps column names to tensors). Never a DataLoader: lots are drawn here.
    loss_fn
        `loss_fn(model, batch)` gives one loss per example. It is traced on synthetic values as the
        program of one example, which is mapped over each lot, so examples cannot meet
        (docs/one-example.md). One that cannot be traced runs on one record at a time.
    batch_size
        Expected size of a lot, into which each record comes with probability batch_size /
        n_records; or a sampler of `tacit.sampling`, which has an expected size of its own. That
        size divides the sum of a lot. Lots differ in size; some are empty.
    clip_norm
        Bound on the norm of one example's gradient; or a clip rule: `Flat`, `PerLayer`, `PerGroup`,
        `Automatic`; or how it changes: `AdaptiveClip`, `ScheduledClip`.
    epochs, steps
        Length of the run: one of them. `epochs` passes are ceil(epochs * n_records / batch_size)
        steps.
    epsilon, delta, noise_multiplier
        The budget, from which the noise follows, or the noise. `noise_multiplier=0` is for
        debugging: its event is `NonPrivate`.
    n_records
        Declared size of the data set; default its length, which is then assumed to be public.
    users
        Whose record each one is, if the unit of privacy is a user and not a record: ids, the name
        of a column, or `Users(...)`. Lots are then samples of users, and what one user adds to a
        step is clipped once, however many records the user has; `batch_size`, `epochs` and
        `n_records` count users. See docs/users.md.
    noise
        How noise is made: `Noise(...)` for schedules, a cryptographic generator, and sums whose
        rounding is bounded; `Banded(...)` for noise that partly cancels over time, which pays with
        few epochs and many steps (docs/correlated-noise.md).
    reports
        `Reports(...)`: a noisy training loss, callbacks, and how much errors show.
    ledger
        Where the plan is reserved before the first release; default a new one in memory.
    checkpoint
        File in which the run keeps model, optimizer and its own state, or `Checkpoint(...)`. If it
        exists, the run goes on from there. The plan then reserves 1 % more steps, which pay for
        those that a crash loses. See docs/guarantees.md.
    also
        Other releases of the same run, such as private features: they are part of `private.event`,
        and with epsilon the noise is chosen so that everything together costs that much. Events in
        `also` are paid by whoever releases them; `make_private` does not spend them.
    seed
        For tests: makes lots and noise reproducible, so anyone who knows it can remove the noise.
    augment
        Changes a whole batch row by row. `Views(8, augment)` averages the gradients of eight views
        of each example before clipping.
    speed
        `Speed(...)`: the options that change the speed and not the guarantee.

    `Noise`, `Reports`, `Speed` and all other settings that are named here are in `tacit.training`.

    Examples
    --------
    >>> import torch, tacit
    >>> x = torch.randn(100, 3)
    >>> data = torch.utils.data.TensorDataset(x, x.sum(1))
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return (model(x).squeeze(1) - y) ** 2
    >>> private = tacit.make_private(model, optimizer, data, loss_fn, batch_size=20, epochs=2,
    ...                              clip_norm=1.0, epsilon=3.0, delta=1e-3)
    >>> for batch in private:
    ...     private.step(batch)
    >>> private.epsilon(delta=1e-3) <= 3.0
    True
    """
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function of (model, batch) that gives one loss for each example, "
            f"got {type(loss_fn).__name__}. Loops that call private.backward() need it too."
        )
    speed, reports, noise = speed or Speed(), reports or Reports(), Noise.of(noise)
    ranks, model, optimizer = Ranks.here(), unwrapped(model), own_optimizer(optimizer)
    parameters = _trained(model, optimizer)
    guard, unit, kept = ErrorGuard(reports.errors_in_full), unit_of(users), _kept(checkpoint)
    ledger = unit.ledger(ledger)
    records = _records(dataset, unit, collate_fn, parameters, guard, model)
    several = augment if isinstance(augment, Views) else Views(1, augment)
    views, transform = several.count, several.transform
    loss_fn, transform = unit.program(records, loss_fn, transform, views)
    n_records = len(records) if n_records is None else n_records
    clip, noise = rule_of(clip_norm), _limited(noise, parameters)
    clip.groups(list(parameters))  # raises if the rule does not fit the model
    of_lot = {"views": views, "augment": transform, "noisy_loss": reports.noisy_loss}
    usual = math.ceil(expected_lot(batch_size, n_records))
    of_start = {"bounded": noise.arithmetic == "bounded", "usual": usual}
    started = _started(model, loss_fn, records, clip, speed, ranks, of_lot, of_start)
    plan = make_plan(
        clip_norm,
        batch_size=batch_size,
        n_records=n_records,
        epochs=epochs,
        steps=steps,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        also=also,
        relation=ledger.relation,
        noise=noise,
        records_per_user=unit.records_per_user,
        noisy_loss=reports.noisy_loss,
        checkpoint=kept,
    )
    _require_same_start(ranks, model, plan, records)
    rounding = _arithmetic(noise.arithmetic, plan, ranks, is_formed=started.programs is None)
    speed, reason = _with_choice_of_compilation(speed, plan, parameters, records)
    needed = started.bytes_of_example
    most = _most_rows(speed, needed, plan, ranks)
    limit = guard(_limit, speed, started, model, loss_fn, views, clip, most=most)
    key = ranks.share(Key.from_seed(seed))
    how = {"compile": speed.compile, "reason": reason, "bounded": rounding.mode == "bounded"}
    lot_sum = LotSum(model, loss_fn, clip, started=started, **how, **of_lot)
    lots = _lots(records, plan, key, ranks, speed, limit=ranks.least(limit))
    is_reported = reports.noisy_loss is not None or bool(reports.callbacks)
    run = Private(
        model,
        optimizer,
        parameters=parameters,
        plan=plan,
        lots=lots,
        lot_sum=lot_sum,
        isolation=started.statement,
        guard=guard,
        noise=_noise(plan, key, secure=noise.secure),
        ledger=ledger,
        ranks=ranks,
        arithmetic=rounding,
        is_reproducible=seed is not None,
        checkpoint=kept,
        mean=_mean(model, plan, noise.correlated),
        reports=StepReports(plan, reports.callbacks, delta=delta) if is_reported else None,
    )
    return _claimed(run, parameters, optimizer)


def _kept(checkpoint: object) -> Checkpoint | None:
    """Return the settings of the checkpoint; None if no checkpoint is kept."""
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    if isinstance(checkpoint, str | os.PathLike):
        return Checkpoint(path=checkpoint)
    raise TypeError(
        "checkpoint must be a file, tacit.training.Checkpoint(...) or None, got "
        f"{type(checkpoint).__name__}."
    )


def _limited(noise: Noise, parameters: dict[str, nn.Parameter]) -> Noise:
    """Return the settings of noise, with bands limited to what their memory allows."""
    if noise.correlated is None:
        return noise
    n = sum(p.numel() for p in parameters.values())
    return replace(noise, correlated=noise.correlated.limited_by_memory(n))


def _noise(plan: TrainingPlan, key: Key, *, secure: bool) -> NoisyMean:
    """Return the noise of a run: independent, or correlated over time."""
    options = {"expected_batch": plan.expected_batch, "secure": secure}
    if len(plan.column) == 1:
        return NoisyMean(key, **options)
    return BandedNoise(key, column=plan.column, restart=plan.restart, **options)


def _mean(model: nn.Module, plan: TrainingPlan, banded: Banded | None) -> TailMean | None:
    """Return the mean of a run's last weights, which correlated noise gains by; None without it."""
    if banded is None or len(plan.column) == 1 or not banded.average:
        return None
    return TailMean(model, steps=plan.steps, share=banded.average)


def _require_same_start(
    ranks: Ranks, model: nn.Module, plan: TrainingPlan, records: Records
) -> None:
    """Raise on all ranks unless they start with the same weights, plan and records."""
    ranks.require_equal("the model at the start", checksum(model))
    ranks.require_equal("the plan", f"{plan.training_event}: {plan}")
    ranks.require_equal("the order of records", plan.order())
    if ranks.size > 1:
        ranks.require_equal("the data set", records.digest(ranks.share(Key.fresh())))


def _records(
    dataset: Any,
    unit: Unit,
    collate_fn: Callable[[list[Any]], Batch] | None,
    parameters: dict[str, nn.Parameter],
    guard: ErrorGuard,
    model: nn.Module,
) -> Records:
    """Return access to the records or users, on the model's device and in its precision."""
    if isinstance(collate_fn, PadTo):
        collate_fn.require_fitting(stacks=unit.users is not None)
    dataset, ids = unit.column(dataset)
    first = next(iter(parameters.values()))
    dtype = first.dtype if first.dtype in (torch.float32, torch.float64) else torch.float32
    options = {"collate_fn": collate_fn, "device": first.device, "dtype": dtype, "guard": guard}
    records = guard(Records, dataset, **options)
    if collate_fn is None and records.is_ragged:
        options["collate_fn"] = PadTo.of_model(model, records.first())
        records = guard(Records, dataset, **options)
    return unit.grouped(records, ids)


def _started(
    model: nn.Module,
    loss_fn: LossFn,
    records: Records,
    clip: Clip,
    speed: Speed,
    ranks: Ranks,
    of_lot: dict[str, Any],  # Any: options of sums of lots
    of_start: dict[str, Any],  # Any: options of `start`, for all ranks
) -> Started:
    """Return the program of one example, traced and compared."""
    options = of_start | {"views": of_lot["views"], "check": speed.check}
    usual = -(-of_start["usual"] // ranks.size)
    options["usual"] = min(speed.max_microbatch or usual, usual)
    with told_if_slow("comparing the program with loss_fn on synthetic records"):
        begin = partial(start, model, loss_fn, records, of_lot["augment"], clip, **options)
        return ranks.on_all(begin)


def _arithmetic(
    wanted: Literal["fast", "bounded"],
    plan: TrainingPlan,
    ranks: Ranks,
    *,
    is_formed: bool,
) -> Arithmetic:
    """Return how a run's sums are computed, and what is proved about their rounding."""
    largest = largest_lot(plan.sampler, plan.n_records + plan.records_per_user - 1)
    return arithmetic_of("formed" if is_formed else wanted, largest_lot=largest, ranks=ranks.size)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the model's trainable parameters by name; raise if the optimizer's differ.

    Raises too if a layer mixes examples or gives sparse gradients.
    """
    check_layers(norm_layers(model))
    refuse_sparse(model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer must take one gradient a step, got LBFGS, which takes several.")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("optimizer must take dense gradients, got SparseAdam. Use Adam.")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("model has no trainable parameters: every requires_grad is False.")
    for name, p in named.items():
        if isinstance(p, UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: run the model once before make_private.")
        if p.is_complex():
            raise ValueError(
                f"{name} is complex, but gradients are clipped and noised as real numbers. Store "
                "it as a real parameter with two numbers per entry, and use torch.view_as_complex."
            )
    of_model = {id(p) for p in model.parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if foreign := len(held - of_model):
        raise ValueError(
            f"optimizer holds {foreign} parameter(s) that the model does not have, so nothing "
            "would make their gradient private. Build the optimizer from model.parameters()."
        )
    if missing := [name for name, p in named.items() if id(p) not in held]:
        raise ValueError(
            f"optimizer does not hold the trainable parameter {missing[0]} ({len(missing)} in all)."
            " Add it, or freeze it with requires_grad_(False)."
        )
    return named


def _claimed(
    run: Private, named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Private:
    """Reserve parameters for `run`, and return it in the state of its checkpoint, if it has one.

    Raises if another optimizer's unfinished run has one of the parameters.
    """
    for other, (ids, used) in list(_RUNS.items()):
        if other.steps_taken == other.steps:
            del _RUNS[other]
        elif used is not optimizer and (shared := [n for n, p in named.items() if id(p) in ids]):
            raise ValueError(
                f"{shared[0]} is shared with another optimizer, whose private run is not over. "
                "Finish that run or delete it first."
            )
    _RUNS[run] = ({id(p) for p in named.values()}, optimizer)
    open_checkpoint(run)
    return run


def _with_choice_of_compilation(
    speed: Speed,
    plan: TrainingPlan,
    parameters: dict[str, nn.Parameter],
    records: Records,
) -> tuple[Speed, str]:
    """Return `speed` with compile="auto" replaced by False if compiling does not pay.

    The second result is a sentence to be printed before the first step: that the step is compiled,
    or what keeps it from being compiled where that would pay; else it is empty. Compiling takes
    about 20 s and 0.25 s for each trained tensor, and saves about 1.5 ms a step and 0.35 ms for
    each trained tensor: measured on an H200 (benchmarks/results/training-gpu.md). Only the plan and
    the program count.
    """
    obstacle = _why_not_compiled(plan, parameters, records)
    if speed.compile is True and obstacle:
        raise ValueError(f"compile cannot {obstacle}.")
    if speed.compile != "auto":
        return speed, ""
    tensors = len(parameters)
    takes, saves = 20 + 0.25 * tensors, plan.steps * (1.5e-3 + 0.35e-3 * tensors)
    is_asked_for = next(iter(parameters.values())).is_cuda
    if not is_asked_for or saves < takes:
        return replace(speed, compile=False), ""
    if obstacle:
        return replace(speed, compile=False), (
            f"The step is not compiled, which would save about {saves:.0f} s: compiled steps "
            f"cannot {obstacle}."
        )
    return speed, (
        f"The step is compiled, which takes about {takes:.0f} s and saves about {saves:.0f} s in "
        f"{plan.steps:,} steps. speed=Speed(compile=False) runs it as it is."
    )


def _why_not_compiled(
    plan: TrainingPlan, parameters: dict[str, nn.Parameter], records: Records
) -> str:
    """Return what compiled steps cannot do and the run would need; empty if nothing."""
    if records.n_lengths > 1:
        return "take records of several lengths; PadTo(lengths=[n]) gives them one"
    if plan.adaptive is not None and len(plan.clip.clip_norms) > 1:
        return "adapt several clip norms, whose ratios are in the graph"
    if any(isinstance(p, DTensor) for p in parameters.values()):
        return "take sharded parameters: their storage moves"
    if plan.noisy_loss is not None:
        return "release noisy_loss: compiled graphs return gradients alone"
    return ""


def _most_rows(speed: Speed, bytes_per_example: int, plan: TrainingPlan, ranks: Ranks) -> int:
    """Return the rows above which a lot comes in several microbatches, if memory allows."""
    expected_batch = plan.expected_batch / ranks.size
    if speed.max_microbatch is not None:
        return speed.max_microbatch
    if _has_one_size(plan):
        return math.ceil(expected_batch)
    return largest_microbatch(expected_batch, bytes_per_example)


def _limit(
    speed: Speed,
    started: Started,
    model: nn.Module,
    loss_fn: LossFn,
    views: int,
    clip: Clip,
    *,
    most: int,
) -> int:
    """Return the rows of a microbatch: `max_microbatch` if given, else what fits in memory."""
    if speed.max_microbatch is not None:
        return speed.max_microbatch
    device = next(model.parameters()).device
    estimate = starting_limit(started.bytes_of_example, device, largest_lot=most)
    if device.type != "cuda":
        return estimate

    def step(batch: Batch) -> ClippedSum:
        mask = torch.ones(n_rows(batch) // views, dtype=torch.bool, device=device)
        return started.engine(Examples(model, loss_fn, batch, mask, views), clip)

    with zero_step(model, started.blank, step) as run:
        sums = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
        # A step has the gradient and the optimizer's state beside the sums that it computes.
        return fitting_rows(run, GPUMeter(device), most=most, reserved=3 * sums)


def _has_one_size(plan: TrainingPlan) -> bool:
    """Return whether every lot has the same number of records, but for the end of an epoch."""
    return isinstance(plan.sampler, sampling.FixedSize | sampling.Shuffle)


def _padding(speed: Speed, plan: TrainingPlan, ranks: Ranks, limit: int) -> Padding | None:
    """Return the sizes to which microbatches are padded; None if they are not."""
    if not speed.compile:
        return None
    rate = min(1.0, plan.expected_batch / plan.n_records)
    is_fixed = _has_one_size(plan)
    deviation = 0.0 if is_fixed else math.sqrt(plan.expected_batch * (1 - rate)) / ranks.size
    return choose_padding(plan.expected_batch / ranks.size, deviation, limit=limit)


def _lots(
    records: Records,
    plan: TrainingPlan,
    key: Key,
    ranks: Ranks,
    speed: Speed,
    *,
    limit: int,
) -> Lots:
    padding = _padding(speed, plan, ranks, limit)
    return Lots(
        records,
        plan.drawer,
        key=key,
        limit=limit,
        padding=padding,
        num_workers=speed.num_workers,
        rank=ranks.rank,
        ranks=ranks.size,
    )
