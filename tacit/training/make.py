"""`make_private`: arguments in, checks made, a run that has spent nothing yet out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tacit._check import whole
from tacit.events import Event
from tacit.ledger import Ledger
from tacit.training import compatible
from tacit.training.adaptive import AdaptiveClip
from tacit.training.clip import Clip, Flat
from tacit.training.distributed import Ranks, checksum, gathered, unwrapped
from tacit.training.foreign import own_optimizer
from tacit.training.lots import Lots
from tacit.training.machinery import Machinery
from tacit.training.memory import starting_limit, usual_lot
from tacit.training.noise import Key
from tacit.training.plan import (
    Plan,
    Sampler,
    choose_noise,
    choose_sampler,
    count_steps,
    other_events,
)
from tacit.training.private import Private
from tacit.training.records import Batch, Records, n_rows
from tacit.training.schedules import Schedule, factors

_PROBE_ROWS = 3


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,  # Any: a map-style Dataset, a tensor, or a tuple of tensors
    loss_fn: compatible.Loss | None = None,
    *,
    batch_size: int,
    clip_norm: float | Clip,
    epochs: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    clip_schedule: Schedule | None = None,
    noise_schedule: Schedule | None = None,
    adaptive: AdaptiveClip | None = None,
    n_records: int | None = None,
    sampler: Sampler | None = None,
    ledger: Ledger | None = None,
    also: Event | Sequence[Event] = (),
    seed: int | None = None,
    secure: bool = False,
    collate_fn: Callable[[list[Any]], Batch] | None = None,
    max_microbatch: int | None = None,
    static_shapes: bool = False,
    num_workers: int = 0,
    engine: str = "auto",
    compile: bool = False,
    augmentations: int = 1,
    augment: Callable[[Batch], Batch] | None = None,
    check: bool = True,
) -> Private:
    """A private run of DP-SGD on `model`, planned, checked and not yet paid.

    Guarantee: the model after the run, and every gradient in it, is `private.event` of the records,
    under the ledger's relation; with `epsilon` and `delta` given, at most that. It assumes that
    `n_records` is public, and that nothing else computed from the records leaves the program.

    Parameters
    ----------
    dataset
        Map-style `Dataset`, tensor, or tuple of tensors. Never a DataLoader: lots are drawn by
        `sampler`, each record with probability batch_size / n_records.
    loss_fn
        `loss_fn(model, batch)` gives one loss per example. None for loops that use
        `private.backward`; then nothing can be probed before the run, and examples that mix are
        found in known layers (BatchNorm) only.
    batch_size
        Expected size of a lot, and the divisor of its sum. Lots differ in size; some are empty.
    epochs, steps
        Length of the run: one of them. `epochs` passes are ceil(epochs * n_records / batch_size)
        steps.
    clip_norm
        Bound on the norm of one example's gradient, or a rule of `tacit.training`: `Flat`,
        `PerLayer`, `PerGroup`, `Automatic`.
    epsilon, delta, noise_multiplier
        The budget, from which the noise follows, or the noise. `noise_multiplier=0` is for
        debugging: its event is `NonPrivate`.
    clip_schedule, noise_schedule
        Factors by step, see `tacit.training.schedules`; with epsilon, the noise is scaled so that
        the whole schedule costs that much.
    adaptive
        `AdaptiveClip(...)`: clip norms follow a private quantile from `clip_norm` on.
    n_records
        Declared size of the data set; default its length, which is then assumed to be public.
    sampler
        None for Poisson; or one of `tacit.sampling`.
    ledger
        Where the plan is reserved before the first release; default a new one in memory.
    also
        Other releases of the same run, such as private features: they are part of `private.event`,
        and with epsilon the noise is chosen so that everything together costs that much. Events in
        `also` are paid by whoever releases them; `make_private` does not spend them.
    seed
        For tests: makes lots and noise reproducible, so who knows it can remove the noise.
    secure
        Cryptographic noise on a grid, against attacks on floating-point noise. Slower.
    max_microbatch
        Most rows at once; default found from the memory at hand, and halved when it runs out.
    static_shapes
        Pad every physical batch to one shape, so that compiled graphs are built once.
    engine
        "auto" takes the fastest that the model allows; see `tacit.training.clipped_sum`.
    compile
        Compile forward, norms and contraction, and replay them as a CUDA graph on a GPU; implies
        `static_shapes`. The first step takes tens of seconds, later ones less time than without.
        What the model and `loss_fn` read from Python, such as a coefficient that changes, is fixed
        at the first step. See docs/speed.md.
    num_workers
        Processes that fetch records ahead.
    augmentations, augment
        Average `augmentations` views of each example before clipping; `augment` turns a batch with
        each row repeated into its views.
    check
        Whether to probe the model for mixing of examples; known layers are refused in any case.

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
    ranks, model, optimizer = Ranks.here(), unwrapped(model), own_optimizer(optimizer)
    parameters = compatible.trainable(model, optimizer)
    compatible.check_layers(compatible.norm_layers(model))
    records = Records(dataset, collate_fn=collate_fn, device=next(iter(parameters.values())).device)
    ledger = Ledger() if ledger is None else ledger
    plan = _without_noise(
        clip_norm if not isinstance(clip_norm, int | float) else Flat(clip_norm),
        batch_size=whole(batch_size=batch_size, least=1),
        n_records=whole(n_records=len(records) if n_records is None else n_records, least=1),
        epochs=epochs,
        steps=steps,
        clip_schedule=clip_schedule,
        adaptive=adaptive,
        sampler=sampler,
        also=other_events(also),
    )
    plan.clip.groups(list(parameters))  # raises if the rule does not fit the model
    multipliers = choose_noise(
        plan,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        noise_factors=factors(noise_schedule, plan.steps, name="noise_schedule"),
        relation=ledger.relation,
    )
    plan = replace(plan, noise_multipliers=multipliers)
    ranks.require_equal("the model at the start", checksum(model))
    ranks.require_equal("the plan and the data set", [plan.fingerprint(), len(records)])
    machinery = Machinery(
        engine=engine,
        augmentations=whole(augmentations=augmentations, least=1),
        augment=augment,
        is_compiled=compile,
    )
    _check_compilable(machinery, plan, parameters)
    key = ranks.share(Key.from_seed(seed))
    lots = Lots(
        records,
        plan.drawer,
        key=key,
        limit=ranks.least(
            _limit(
                model,
                loss_fn,
                records,
                plan,
                machinery,
                max_microbatch,
                ranks,
                static_shapes=static_shapes or compile,
                check=check,
            )
        ),
        pad=static_shapes or compile,
        num_workers=whole(num_workers=num_workers),
        part=ranks.rank,
        parts=ranks.size,
    )
    return Private(
        model,
        optimizer,
        loss_fn,
        plan=plan,
        lots=lots,
        key=key,
        ledger=ledger,
        ranks=ranks,
        machinery=machinery,
        secure=secure,
        is_reproducible=seed is not None,
    )


def _without_noise(
    clip: Clip,
    *,
    batch_size: int,
    n_records: int,
    epochs: float | None,
    steps: int | None,
    clip_schedule: Schedule | None,
    adaptive: AdaptiveClip | None,
    sampler: Sampler | None,
    also: tuple[Event, ...],
) -> Plan:
    if batch_size > n_records:
        raise ValueError(
            f"batch_size must be <= n_records, got {batch_size} and {n_records}: "
            "a lot cannot be expected to hold more records than there are."
        )
    count = count_steps(epochs=epochs, steps=steps, batch_size=batch_size, n_records=n_records)
    sampler, expected = choose_sampler(
        sampler, batch_size=batch_size, n_records=n_records, steps=count
    )
    return Plan(
        sampler=sampler,
        steps=count,
        expected_batch=expected,
        n_records=n_records,
        clip=clip,
        noise_multipliers=(),
        clip_factors=factors(clip_schedule, count, name="clip_schedule"),
        adaptive=adaptive,
        also=also,
    )


def _check_compilable(
    machinery: Machinery, plan: Plan, parameters: dict[str, nn.Parameter]
) -> None:
    if not machinery.is_compiled:
        return
    if machinery.engine not in ("auto", "bookkeeping"):
        raise ValueError(
            f"engine must be 'auto' or 'bookkeeping' with compile, got {machinery.engine!r}."
        )
    if plan.adaptive is not None and len(plan.clip.clip_norms) > 1:
        raise ValueError("compile cannot adapt several clip norms, whose ratios are in the graph.")
    if any(isinstance(p, DTensor) for p in parameters.values()):
        raise ValueError("compile cannot take sharded parameters: their storage moves.")


def _limit(
    model: nn.Module,
    loss_fn: compatible.Loss | None,
    records: Records,
    plan: Plan,
    machinery: Machinery,
    max_microbatch: int | None,
    ranks: Ranks,
    *,
    static_shapes: bool,
    check: bool,
) -> int:
    """Rows to run at once; the probe that measures one also checks that examples do not mix."""
    bytes_per_example = 1
    if check and loss_fn is not None:
        rows = np.arange(_PROBE_ROWS) % len(records)
        with gathered(model):
            batch = records.fetch(rows)
            if n_rows(batch) != _PROBE_ROWS:
                raise ValueError(
                    "the first dimension of a batch must count the examples, but "
                    f"{_PROBE_ROWS} records gave {n_rows(batch)} rows. Change collate_fn."
                )
            bytes_per_example = compatible.probe(model, loss_fn, batch, records.device)
    if max_microbatch is not None:
        return whole(max_microbatch=max_microbatch, least=1)
    # Padding costs as records do: two deviations balance it against a second batch for the rest.
    expected, deviations = plan.expected_batch / ranks.size, 2.0 if static_shapes else 6.0
    return starting_limit(
        bytes_per_example * machinery.augmentations,
        records.device,
        largest_lot=usual_lot(expected, deviations=deviations),
    )
