"""The clipped sum as two compiled graphs: the forward, and the backward with norms and sums.

`program.mapped.run` is a function of tensors, so it can be traced whole for one shape of batch. The
trace is cut where the backward begins, by the partitioner of ordinary compiled training, which
recomputes cheap activations instead of keeping them. Both halves are compiled. The graphs read
parameters and buffers from the model's own tensors, so they follow the optimizer's updates.

The number of rows is left free, so that one compilation serves lots of every size; where one of
torch's operations fixes it, each number is compiled. On a GPU each number of rows is recorded as a
CUDA graph of its own, so batches are padded to few sizes; `weights` marks the rows that count.

Clip norms may change from step to step by a factor s without another compilation. Clipping g at s C
is s times clipping g / s at C, so gradients are divided by s where the backward starts, and the
clip factors are multiplied by s.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training.clip import FLOAT32_ROUNDING, Clip, ClippedSum, trainable
from tacit.training.examples import Examples
from tacit.training.gpu.graph_pair import Traced, partition, start_processes
from tacit.training.gpu.graph_replay import (
    FiniteFlag,
    Recordings,
    ReplayedStep,
    Step,
    report,
)
from tacit.training.program import mapped
from tacit.training.program.mapped import NonFinite
from tacit.training.program.programs import Programs
from tacit.training.rules.ghost_norm import cudnn_rounds, multiplied_in
from tacit.training.rules.operands import Unsupported
from tacit.training.tree import is_out_of_memory, with_rows

if TYPE_CHECKING:
    from tacit.training.lots import PendingMicrobatch

_MOST_VERSIONS = 2  # of the program, which is new when a Python value changes: each is compiled
# Bytes of activations that a GPU masks in less time than the host needs to read a flag.
_CHEAP_TO_MASK = 2**28

ScaledStep = Callable[[float, Tensor, list[Tensor]], list[Tensor]]
"""(scale of the clip norms, mask, tensors of the batch) -> results of the backward."""


class NotCompiled(Exception):
    """Raised with the reason why a step cannot be compiled. Its cause is the original error."""


class CompiledSum:
    """The clipped sum for one model, loss and clip rule, compiled.

    It is that of the mapped `programs`; the graphs are made anew when these are traced again.

    It is called with a batch, 0/1 weights, and the factor by which this step's clip norms differ
    from the rule's. All batches have records of one shape. On a GPU the computation is recorded
    as one CUDA graph and replayed, so it costs one launch. The result is private.

    A compiled sum does not mask examples whose gradient is not finite, because that would take a
    pass over all activations. Instead `all_finite` says whether the sums since `begin` can be used.
    A GPU reports it as soon as the last norms are known and continues with the contraction while
    the host prepares the next work. Models whose activations are small are masked all the same.

    If this version of torch lacks a private name that compiling needs, the same sums are computed
    without compilation, after one warning.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        clip: Clip,
        programs: Programs,
        *,
        augmentations: int = 1,
        bounded: bool = False,
    ) -> None:
        self.model = model
        self._programs, self._traces = programs, programs.traces
        self.loss_fn = loss_fn
        self.clip = clip
        self.views = augmentations
        self.bounded = bounded
        self._modules = list(model.modules())
        self._versions: set[int] = set()  # of the program that were compiled, by `traces`
        self._tensors = _reader(model, self._modules)
        self._device = next(model.parameters()).device
        self._addresses: list[int] = []  # of parameters and buffers, for which the graphs are built
        self._graphs: dict[Any, _StateGraphs] = {}  # by state
        self._present: _StateGraphs | None = None  # those of the lot that has begun last
        self._is_in_lot = False  # whether it has not ended: the state is looked at once for a lot
        self._flag = FiniteFlag(self._device) if self._device.type == "cuda" else None
        if self._flag is not None:
            start_processes()  # while the model is traced
        self._all_finite = True  # as far as the host has seen
        self.deferred: ReplayedStep | None = None  # of the lot that has begun last

    def begin(self) -> None:
        """Start a new lot: forget whether the gradients of earlier lots were finite."""
        self._all_finite, self.deferred = True, None
        if self._programs.traces != self._traces:
            self._graphs.clear()
            self._traces = self._programs.traces
        self._present, self._is_in_lot = self._in_present_state(), True
        if self._flag is not None:
            self._flag.clear()

    def all_finite(self) -> bool:
        """Return True if every gradient since `begin` was finite or its example was masked."""
        self._is_in_lot = False
        return self._all_finite and (self._flag is None or self._flag.all_finite())

    @property
    def draws(self) -> bool:
        """Whether the model may draw random numbers (dropout); True until a graph is traced."""
        traces = self._in_lot().traces
        return not traces or any(traced.draws for traced in traces)

    @property
    def has_fixed_rows(self) -> bool:
        """Whether each number of rows takes a compilation, as far as is known."""
        return not all(t.rows is None or t.rows.are_free() for t in self._in_lot().traces)

    def __call__(
        self, batch: Any, weights: Tensor, scale: float = 1.0, *, reuse: bool = False
    ) -> ClippedSum:
        """Return the clipped sum of a batch at `scale` times the clip rule's clip norms.

        `weights` is 0 for rows that are padding. With `reuse`, the result may be in memory that the
        next call overwrites.
        """
        mask = weights if weights.dtype == torch.bool else weights > 0
        graphs = self._in_lot()
        traced, tensors = self._trace_for(graphs, batch, mask)
        if (run := graphs.runs.get(mask.shape[0])) is None:
            with _undisturbed(self._device), _compiling():
                if mask.is_cuda and traced.is_compiled:
                    run = ReplayedStep(traced.run, mask, tensors, recordings=graphs.recordings)
                else:
                    run = _plain(traced.run, mask, tensors)
            graphs.runs[mask.shape[0]] = run
        return self._run(traced, partial(run, scale, mask, tensors), reuse=reuse)

    def of_records(
        self,
        microbatch: "PendingMicrobatch",
        data: tuple[Tensor, ...],
        scale: float = 1.0,
        *,
        reuse: bool = False,
        defer: bool = False,
    ) -> ClippedSum:
        """Return the clipped sum of a microbatch whose records are rows of `data` on the GPU.

        If the tensors are contiguous, the CUDA graph copies these rows from `data`. Otherwise the
        host fetches the microbatch. With `defer`, a sum that the host need not look at is only
        prepared: `deferred` is then the replay that computes it, which is left to the caller. A
        model that draws random numbers is not deferred: their seed is set for this call.
        """
        graphs = self._in_lot()
        if microbatch.rows not in graphs.of_rows:
            batch, mask = _padded(microbatch)
            traced, tensors = self._trace_for(graphs, batch, mask)
            run = None
            if all(t.is_contiguous() for t in data) and traced.is_compiled:
                with _undisturbed(self._device), _compiling():
                    shared = graphs.recordings
                    run = ReplayedStep(traced.run, mask, tensors, data, recordings=shared)
            graphs.of_rows[microbatch.rows] = run, traced
        run, traced = graphs.of_rows[microbatch.rows]
        if run is None:
            return self(*_padded(microbatch), scale, reuse=reuse)
        step = run.of_rows
        if defer and reuse and not (traced.reports or traced.draws):
            self.deferred, step = run, run.prepare
        return self._run(traced, partial(step, scale, microbatch.indices), reuse=reuse)

    def _run(self, traced: Traced, run: Callable[[], list[Tensor]], *, reuse: bool) -> ClippedSum:
        """Call `run` and return its results as a `ClippedSum`; copy them if `reuse` is False."""
        if self._flag is None:
            *sums, within, is_finite = run()
            self._all_finite = self._all_finite and bool(is_finite)
        else:
            if traced.reports:
                self._flag.expect()
            try:
                *sums, within, _ = run() if reuse else [t.clone() for t in run()]
            except RuntimeError:  # for example out of memory: the flag may never arrive
                self._all_finite = False
                raise
        return ClippedSum(dict(zip(traced.names, sums, strict=True)), within)

    def _state(self) -> tuple[Any, ...]:
        """Return the settings that are fixed in a graph, as a key for the cache of graphs.

        These are the modes of the modules, which parameters train, autocast and precision settings.
        """
        kind = self._device.type
        return (
            tuple(module.training for module in self._modules),
            tuple(tensor.requires_grad for tensor in self._tensors()),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            multiplied_in(torch.float32),  # the room of the norms depends on these two
            kind == "cuda" and cudnn_rounds(),
        )

    def _in_lot(self) -> "_StateGraphs":
        """Return the graphs of this lot; for a call outside of a lot, those of the present."""
        if self._present is None or not self._is_in_lot:
            return self._in_present_state()
        return self._present

    def _in_present_state(self) -> "_StateGraphs":
        """Return the graphs for the present state, none if it is new.

        All graphs are dropped if a parameter or buffer has moved, since they read fixed addresses.
        """
        addresses = [tensor.data_ptr() for tensor in self._tensors()]
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses
        state = self._state()
        if state not in self._graphs:
            self._graphs[state] = _StateGraphs([], {}, {}, Recordings())
        return self._graphs[state]

    def _trace_for(
        self, graphs: "_StateGraphs", batch: Any, mask: Tensor
    ) -> tuple[Traced, list[Tensor]]:
        """Return the trace that serves this number of rows, made if it is new, and the tensors.

        Records of another shape than the program was traced for raise `Untraceable`.
        """
        self._programs.program_of(batch)  # traced here if it is new, not in the compiler's trace
        tensors = [t.contiguous() for t in with_rows(batch)[0]]
        rows = mask.shape[0]
        fits = (t for t in graphs.traces if t.rows is None or t.rows.serve(rows))
        traced = next(fits, None)
        if traced is None:
            self._check_versions()
            # A resumed run builds its graphs at another step, so building them must not draw from
            # the random stream.
            with _undisturbed(self._device), _compiling():
                traced = self._traced(batch, mask, tensors)
            graphs.traces.append(traced)
        return traced, tensors

    def _check_versions(self) -> None:
        """Raise if the program has been traced again so often that compiling does not pay."""
        self._versions.add(self._programs.traces)
        if len(self._versions) > _MOST_VERSIONS:
            changed = ", ".join(self._programs.changed) or "the mode of a module"
            raise NotCompiled(
                f"the program reads a Python value that changes ({changed}), and would be compiled "
                "for each. Hold it in a tensor, such as a buffer, instead"
            )

    def _traced(self, batch: Any, mask: Tensor, tensors: list[Tensor]) -> Traced:
        """Trace the clipped sum, and cut it before the backward."""
        parameters = trainable(self.model)
        _, rebuild = with_rows(batch)

        chosen: list[NonFinite] = []

        def choose(held: int) -> NonFinite:
            is_cheap = mask.is_cuda and held < _CHEAP_TO_MASK
            chosen.append("mask" if is_cheap else "ignore")
            return chosen[-1]

        def joint(seed: Tensor, factor: Tensor, mask: Tensor, *given: Tensor) -> list[Tensor]:
            total: list[Tensor] = []

            def seeded(losses: Tensor) -> Tensor:
                total.append(losses.detach().sum())
                return _Seeded.apply(losses, seed)

            clip = _Rescaled(self.clip, factor, self._flag, chosen)
            given = rebuild(given)
            examples = Examples(self.model, self.loss_fn, given, mask, self.views, self.bounded)
            how = {"seeded": seeded, "nonfinite": choose}
            found = mapped.run(examples, clip, programs=self._programs, **how)
            return [total[0], *found.sums.values(), found.within, clip.is_finite]

        seed, factor = (torch.ones((), device=mask.device) for _ in range(2))
        example = (seed, factor, mask, *tensors)
        traced = partition(joint, example)
        return traced._replace(names=tuple(parameters), reports=chosen[-1:] != ["mask"])


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Restore torch's random state after the block, in which gradients are computed."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        yield


@contextmanager
def _compiling() -> Iterator[None]:
    """Raise `NotCompiled` for any error of the block except that memory ran out.

    The block traces, compiles or records: a step can fail at each of these and run as it is.
    """
    try:
        yield
    except NotCompiled:
        raise
    except (IncompatibleModel, Unsupported) as error:
        raise NotCompiled(str(error)) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        kind = type(error).__name__
        reason = f"torch's compiler raised {kind}"
        if "DataDependent" in kind:
            reason = "what the program computes depends on values of the batch, such as lengths"
        raise NotCompiled(reason) from error


class _StateGraphs(NamedTuple):
    """What is compiled for one state of the model."""

    traces: list[Traced]  # one if it leaves the number of rows free
    runs: dict[int, ScaledStep]  # by rows, for batches that the host has fetched
    of_rows: "dict[int, tuple[ReplayedStep | None, Traced]]"  # by rows, for records on the GPU
    recordings: Recordings  # the memory that recordings share


class _Rescaled:
    """A clip rule with its factors times `factor`; reports to `flag` if all norms are finite.

    It does not report if examples whose gradient is not finite are masked, as the last entry of
    `chosen` says when the factors are computed.
    """

    def __init__(
        self, rule: Clip, factor: Tensor, flag: FiniteFlag | None, chosen: list[NonFinite]
    ) -> None:
        self._rule = rule
        self._factor = factor
        self._flag = flag
        self._chosen = chosen
        self.is_finite = factor
        self.clip_norms = rule.clip_norms
        self.l2_sensitivity = rule.l2_sensitivity
        self.noise_scales = rule.noise_scales
        self.groups = rule.groups

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        # Padded rows count too, since 0 * inf in one of them would make the sum nan.
        self.is_finite = torch.isfinite(squared_norms).all()
        factors = self._rule.factors(squared_norms, rounding=rounding) * self._factor
        if self._flag is None or self._chosen[-1] == "mask":
            return factors
        return report(factors, self.is_finite, self._flag)


class _Seeded(torch.autograd.Function):
    """The identity, whose backward multiplies the gradient by the scalar tensor `seed`.

    The backward of the model begins at the losses, so the partitioner cuts the graph there.
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # as torch documents it
        (seed,) = ctx.saved_tensors
        return g * seed.to(g.dtype), None


def _reader(model: nn.Module, modules: list[nn.Module]) -> Callable[[], Iterator[Tensor]]:
    """Return a function that yields the model's current parameters and buffers.

    That function is called at every step. It reads the private dictionaries of the modules, which
    is several times faster than `model.parameters()`.
    """
    try:
        homes = [home for m in modules for home in (m._parameters, m._buffers) if home]
    except AttributeError:
        return lambda: itertools.chain(model.parameters(), model.buffers())
    return lambda: (tensor for home in homes for tensor in home.values() if tensor is not None)


def _plain(step: Step, mask: Tensor, tensors: list[Tensor]) -> ScaledStep:
    """Return a compiled step as a function of (scale, mask, tensors), without a CUDA graph.

    The step is called once here, so that it is compiled before its first use.
    """
    one = torch.ones((), device=mask.device)

    def run(scale: float, mask: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        return step(one / scale, [one * scale, mask, *tensors])

    run(1.0, mask, tensors)
    return run


def _padded(pending: "PendingMicrobatch") -> tuple[Any, Tensor]:
    microbatch = pending.fetch()
    assert microbatch.weights is not None  # compiled batches are padded
    return microbatch.batch, microbatch.weights
