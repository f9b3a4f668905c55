"""Clipped sum in one backward that forms no weight gradient.

Every operation on a trainable tensor goes through a layer rule, whose backward returns the input
gradient only and leaves a piece that stands for the per-example gradients. From the pieces come
each example's norm, then its factor, then the sum in one weighted contraction per parameter: the
arithmetic of an ordinary step plus that of the norms (Bu et al. 2023, arXiv:2210.00038).

Operations are intercepted by a torch function mode for the length of the call: nothing is attached
to the model. A trainable tensor used in any way that the mode did not see would receive an ordinary
gradient; autograd is asked for those, and the call fails over unless there are none.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tacit.training.clip import Clip
from tacit.training.engines import batch as b
from tacit.training.engines.tape import Derived, NonFinite, Recorder
from tacit.training.engines.trace import Key, Label, Plan, Spec, make_plan, results_in, tensors_in
from tacit.training.gradients import RULES, generic
from tacit.training.gradients.site import Declined, Unsupported
from tacit.training.sums import ClippedSum, trainable

PLANS_PER_MODEL = 256  # one for each length of sequence, say
# By model, then by what the plan depends on: the plan, or why there is none.
_plans: WeakKeyDictionary[nn.Module, "OrderedDict[Any, Plan | str]"] = WeakKeyDictionary()


class Stale(Exception):
    """The plan does not fit this batch."""


def run(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    clip: Clip,
    mask: Tensor,
    augmentations: int = 1,
) -> ClippedSum:
    """Clipped sum of the rows where `mask` is True."""
    parameters = trainable(model)
    for attempt in range(2):
        plan = plan_for(
            model, loss_fn, batch, parameters, len(mask), augmentations, fresh=attempt > 0
        )
        try:
            return compute(model, loss_fn, batch, clip, mask, augmentations, plan, parameters)
        except Stale:
            continue
        except Unsupported as reason:
            refuse(model, loss_fn, batch, augmentations, reason)
            raise
    raise Unsupported("the model uses its parameters in another way on every batch")


def refuse(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    views: int,
    reason: Unsupported,
) -> None:
    """Remembers that no plan works for batches like this one."""
    key = signature(model, loss_fn, batch, views)
    _plans.setdefault(model, OrderedDict())[key] = reason.reason


def plan_for(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    parameters: dict[str, nn.Parameter],
    examples: int,
    views: int,
    *,
    fresh: bool = False,
) -> Plan:
    """The plan for batches like this one, remembered as long as the model lives."""
    key = signature(model, loss_fn, batch, views)
    plans = _plans.setdefault(model, OrderedDict())
    plan = None if fresh else plans.get(key)
    if plan is None:
        _let_freed_memory_stay()
        try:
            plan = make_plan(model, loss_fn, batch, parameters, examples=examples, views=views)
        except Unsupported as reason:
            plan = reason.reason  # the exception itself would hold its frames, and so the batch
        plans[key] = plan
        if len(plans) > PLANS_PER_MODEL:
            plans.popitem(last=False)
    if isinstance(plan, str):
        raise Unsupported(plan)
    return plan


@lru_cache(maxsize=1)
def _let_freed_memory_stay() -> None:
    """Once in a process: what a step frees on the CPU, the next one finds where it was.

    The GNU C library returns memory to the system beyond twice the largest block that was ever
    mapped and freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD), and every step would fault it in
    again page by page. A block that is not written to costs nothing, here and elsewhere.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def signature(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any, views: int
) -> tuple[Any, ...]:
    """What a plan depends on. A plan that does not fit after all is noticed when it is used."""
    tensors, _ = b.split_rows(batch)
    device = tensors[0].device.type
    return (
        _identity(loss_fn),
        views,
        tuple((t.shape[1:], t.dtype, t.device) for t in tensors),
        tuple(p.requires_grad for p in model.parameters()),
        tuple(module.training for module in model.modules()),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
    )


def _identity(loss_fn: Callable[..., Tensor]) -> tuple[Any, ...]:
    """Equal for two functions made by the same line from the same objects, as in a loop."""
    function = getattr(loss_fn, "__func__", loss_fn)
    code = getattr(function, "__code__", None)
    if code is None:
        return (type(loss_fn), id(loss_fn))
    cells = getattr(function, "__closure__", None) or ()
    return (code, id(getattr(loss_fn, "__self__", None)), *(id(_content(cell)) for cell in cells))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def compute(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    clip: Clip,
    mask: Tensor,
    views: int,
    plan: Plan,
    parameters: dict[str, nn.Parameter],
    *,
    nonfinite: NonFinite = "look",
) -> ClippedSum:
    """The clipped sum as a function of tensors, given the plan.

    Unless it looks, it can be traced.
    """
    rows = len(mask) * views
    recorder = Recorder(parameters, len(mask), clip)
    with recorder.emptied(), torch.enable_grad():
        with Intercept(plan, recorder, rows) as intercept:
            losses = b.checked_losses(loss_fn, model, batch, rows)
        if not losses.requires_grad:
            raise ValueError("loss_fn must depend on the trainable parameters of the model.")
        if not intercept.backward(losses, torch.full_like(losses, 1 / views)):
            raise Stale
        with torch.no_grad():
            return recorder.clipped(mask, nonfinite)


class Intercept(TorchFunctionMode):
    """Sends operations on shared tensors to their layer rules."""

    def __init__(self, plan: Plan, recorder: Recorder, rows: int) -> None:
        super().__init__()
        self.plan, self.recorder, self.rows = plan, recorder, rows
        self.calls: Counter[Key] = Counter()
        self.checkpointed = False
        self.recomputing = False
        self.recomputed: list[Tensor] = []  # held, so that their ids stay theirs

    def backward(self, losses: Tensor, seeds: Tensor) -> bool:
        """Runs the backward; False if a parameter was used where no rule saw it.

        Such a parameter receives an ordinary gradient, which is what is asked for here.
        """
        self.recomputing = True
        self.recorder.is_recording = True
        targets = (self.recorder.anchor, *self.recorder.parameters.values())
        try:
            with torch.autograd.set_multithreading_enabled(False):
                found = self._gradients(losses, seeds, targets)
        finally:
            self.recorder.is_recording = False
        return all(gradient is None for gradient in found)

    def _gradients(self, losses: Tensor, seeds: Tensor, targets: tuple[Tensor, ...]) -> Any:
        if not self.checkpointed:
            return torch.autograd.grad(losses, targets, seeds, allow_unused=True)
        # Checkpointed blocks run again and must save the same tensors, so the mode has to be on;
        # `torch.autograd.grad` is itself a torch function, which would leave it.
        with self:
            return torch.autograd.graph._engine_run_backward(
                (losses,), (seeds,), False, False, targets, True, accumulate_grad=False
            )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self.plan.functions or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        labels = self.recorder.labels
        tensors = tensors_in(args, kwargs)
        shared = tuple(labels[id(t)] for t in tensors if id(t) in labels)
        if not shared:
            return func(*args, **kwargs)
        spec = self._spec((func, shared), tensors)
        if spec.kind == "derived":
            # Derived tensors are pulled back after the backward: a checkpointed block keeps theirs.
            with saved_tensors_hooks(_same, _same):
                result = func(*args, **kwargs)
            self._derive(Derived(results_in(result), func, args, kwargs), shared, tensors)
            return result
        return self._meet(spec, func, args, kwargs, tensors)

    def _derive(self, made: Derived, shared: tuple[Label, ...], tensors: Any) -> None:
        for index, result in enumerate(made.results):
            self.recorder.labels[id(result)] = (made.function, shared, index)
        if self.recomputing:
            self.recomputed.extend(made.results)
        else:
            self.recorder.derive(made, tensors)

    def _spec(self, key: Key, tensors: tuple[Tensor, ...]) -> Spec:
        specs = self.plan.specs.get(key, [])
        index = 0 if self.recomputing else self.calls[key]
        self.calls[key] += 1
        if index >= len(specs):
            raise Stale
        spec = specs[index]
        for tensor, layout in zip(tensors, spec.layouts, strict=True):
            if layout is not None and tensor.shape[layout.dim] != self.rows * layout.inner:
                raise Stale
        return spec

    def _meet(
        self, spec: Spec, func: Any, args: Any, kwargs: dict[str, Any], tensors: tuple[Tensor, ...]
    ) -> Any:
        output = next(layout for layout in spec.outputs if layout is not None)
        if not self.recomputing:
            self.recorder.count(tensors)
            self.checkpointed = self.checkpointed or _saved_tensors_are_hooked()
        site = self.recorder.site(tensors, spec.layouts, output)
        if spec.kind == "spread":
            return generic.spread(site, func, args, kwargs)
        rule = RULES.get(func)
        if rule is not None:
            try:
                return rule(site, *args, **kwargs)
            except Declined:
                pass
        if len(spec.outputs) != 1:
            raise Unsupported("an operation on a shared tensor with several results")
        return generic.generic(site, func, args, kwargs)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _saved_tensors_are_hooked() -> bool:
    """Whether tensors saved now may be recomputed in the backward, as in a checkpointed block."""
    # torch has no public way to ask; without this one, assume so: it costs a little time only.
    ask = getattr(torch._C, "_autograd", None)
    ask = getattr(ask, "_top_saved_tensors_default_hooks", None)
    return ask is None or ask(True) is not None
