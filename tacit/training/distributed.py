"""Many ranks, one release: the draw is global, sums are added, noise is added once.

Every rank holds the data set and the same key, so all draw the same lot and the same noise, and
take the same number of steps, whatever their share of a lot is. Rank r clips records r, r + R,
r + 2R, ... of the lot; the clipped sums are added over the ranks; each rank then adds the *same*
noise to the *same* total and gets the same gradient. So the noise is added once, at the scale of
one process.

Works under torchrun with any backend, for plain models, DistributedDataParallel and FSDP2
(`fully_shard`). With FSDP2, parameters are gathered while gradients are clipped and the gradient is
formed whole on each rank before its shard is kept: optimizer state stays sharded, gradients do not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tacit.errors import BudgetExceeded, IncompatibleModel
from tacit.training.clipping.clip import ClippedSum, accumulator

Result = TypeVar("Result")
_BUCKET = 1 << 24  # elements added over the ranks in one message


@dataclass(frozen=True)
class Ranks:
    """This process's rank and the number of ranks: processes that train one model together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> "Ranks":
        """Return this process's rank in the default process group; rank 0 of 1 without a group."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def share(self, value: Any) -> Any:  # Any: small picklable settings
        """Return rank 0's `value`, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:  # Any: as above
        """Return the values of all ranks, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def least(self, value: int) -> int:
        """Return the smallest `value` of all ranks."""
        return min(self.gather(value))

    def require_equal(self, what: str, value: Any) -> None:  # Any: comparable, picklable, public
        """Raise on every rank unless all have the same `value`; `what` names it in the error."""
        found = self.gather(value)
        if any(other != found[0] for other in found):
            raise ValueError(f"{what} must be the same on every rank.")

    def on_first(self, act: Callable[[], Result]) -> Result:
        """Call `act` on rank 0 alone, and return its result on every rank.

        If it raises there, every rank raises the same error.
        """
        if self.size == 1:
            return act()
        error: Exception | None = None
        result: Any = None  # Any: what `act` returns, which must be picklable
        if self.rank == 0:
            try:
                result = act()
            except Exception as raised:
                error = raised
        error, result = self.share((error, result))
        if error is not None:
            raise error
        return result

    def on_all(self, act: Callable[[], Result]) -> Result:
        """Call `act` on every rank; if it raises on one of them, no other rank waits for it."""
        error: Exception | None = None
        result: Any = None  # Any: what `act` returns
        try:
            result = act()
        except Exception as raised:
            if self.size == 1:
                raise
            error = raised
        if self.least(int(error is None)) == 0:
            raise error or IncompatibleModel("another rank refused the program; see its error.")
        return result

    def pay_and_add(
        self,
        total: ClippedSum,
        drawn: float,
        pay: Callable[[], None],
        like: Mapping[str, Tensor] | None = None,
    ) -> tuple[ClippedSum, float]:
        """Call `pay` for a step on rank 0, then add `total` over all ranks, in place. Private.

        If it cannot pay, every rank raises and nothing is released. `drawn` is the number of
        records of this rank; the sum and the number over all ranks are returned. Sums are added in
        the precision of the parameters in `like`, since a rank may have used an engine of another.
        """
        failure: Exception | None = None
        if self.rank == 0:
            try:
                pay()
            except Exception as error:  # raised below: the other ranks must learn of it first
                failure = error
        for name, value in total.sums.items():
            if like and name in like:
                value = value.to(accumulator(like[name].dtype))
            # Noise is indexed by memory offset, so every rank needs the same layout.
            total.sums[name] = value.to_dense().contiguous()
        counts = torch.tensor([drawn, failure is not None, total.loss], dtype=torch.float64)
        counts = counts.to(total.within.device)
        self.add([*total.sums.values(), total.within, counts])
        if failure is not None:
            raise failure
        if counts[1] > 0:
            raise BudgetExceeded("rank 0 could not pay for this step; nothing was released.")
        return replace(total, loss=int(counts[2])), float(counts[0])

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat)
            for t, total in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                t.copy_(total.view(t.shape))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel wrapper, so its hooks do not run."""
    if isinstance(model, DistributedDataParallel):
        return model.module
    if type(model).__name__ == "FullyShardedDataParallel":
        raise TypeError("model must use FSDP2 (torch.distributed.fsdp.fully_shard), got FSDP1.")
    return model


def checksum(model: nn.Module) -> list[float]:
    """Return the sum of each parameter's entries, to check that ranks start from equal weights."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    parts = (p.detach().reshape(-1).split(2**17) for p in whole)  # no parameter whole in float64
    return [sum(float(part.double().sum()) for part in of_one) for of_one in parts]


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has split the model's parameters over the ranks."""
    return any(isinstance(p, DTensor) for p in model.parameters())


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather an FSDP2 model's whole parameters on each rank in the block; hooks are off inside."""
    sharded = [m for m in model.modules() if hasattr(m, "unshard") and hasattr(m, "reshard")]
    if not sharded:
        yield
        return
    for module in sharded:
        module.unshard()  # type: ignore[operator]  # a method of FSDPModule
    try:
        with _without_hooks(model):
            yield
    finally:
        for module in sharded:
            module.reshard()  # type: ignore[operator]


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Switch off the forward hooks of a model inside the block, as sharded models need.

    FSDP2 frees the gathered parameters in a hook. The hooks stay on in versions of torch that lack
    the private dictionaries used here.
    """
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    found = [getattr(module, kind, {}) for module in model.modules() for kind in kinds]
    kept = [(hooks, dict(hooks)) for hooks in found]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def like_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return `gradient` in the parameter's dtype; for a sharded parameter, this rank's shard."""
    gradient = gradient.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(gradient, mesh, placements, src_data_rank=None)
    return gradient


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of tensors of one dtype and at most `_BUCKET` elements, to send together."""
    bucket: list[Tensor] = []
    size = 0
    for t in tensors:
        if bucket and (t.dtype != bucket[0].dtype or size + t.numel() > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += t.numel()
    if bucket:
        yield bucket
