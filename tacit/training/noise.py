"""The one noisy release of a training step: (clipped sum + noise) / expected batch."""

import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tacit.training.distributed import like_parameter
from tacit.training.grid_noise import (
    NoiseGrid,
    SparseSum,
    SumOnGrid,
    add_noise,
    make_grids,
)
from tacit.training.key import Key, NoiseWords

if TYPE_CHECKING:
    from tacit.training.gpu.noise import Blocks
    from tacit.training.gpu.recorded_update import RecordedUpdate

_PLACES = 4  # number of buffer addresses whose launch parameters are cached (LRU)
_GPU_REACH = 13.2  # standard deviations that the noise of the GPU kernel can reach
_REACH = 9.0  # beyond what one record moves, in standard deviations: mass 2e-19


class NoisyMean:
    """Turns a clipped sum into the released gradient: (sum + noise) / expected_batch.

    Guarantee: `events.Gaussian(noise_multiplier)` per call, if the scales fit the clip rule: with
    g_p one example's clipped contribution to parameter p, sum_p |g_p|^2 / scale_p^2 <= 1. In
    coordinates divided by their scale the sum has L2 sensitivity 1, and the noise is
    N(0, noise_multiplier^2 I). For flat clipping every scale is the clip norm.

    Sum and noise are whole multiples of a public step, and what is released is their integer sum,
    so that its low bits reveal nothing (`grid_noise` has the proof, and the charge for rounding).
    Division and rounding to the parameter's type come after the release and are post-processing.

    The noise is a function of the key and of the step, drawn by a cryptographic generator if one is
    installed (`generator` names it); with `secure`, by a cryptographic one in any case. A copy of
    this object in another process would draw the same noise, so it refuses to be copied.
    """

    def __init__(
        self,
        key: Key,
        *,
        expected_batch: float,
        column: Sequence[float] = (1.0,),
        secure: bool = False,
    ) -> None:
        self._key = key
        self._column = np.asarray(column, np.float64)  # of correlated noise: see `banded_noise`
        self._expected_batch = expected_batch  # declared: the drawn size is private
        self._factor = 1.0 / (expected_batch * column[0])  # makes a release the gradient
        self._secure = secure
        self._process = os.getpid()
        self._blocks: OrderedDict[Any, Blocks | None] = OrderedDict()
        self._written: dict[int, _Row] = {}  # by the place of a sum among all

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a private run cannot be copied or pickled: both copies would add the same noise to "
            "different sums. Save private.state_dict(), and load it into a new run."
        )

    def use(self, key: Key) -> None:
        """Use `key` for the noise drawn from now on."""
        self._key = key

    def generator(self, device: torch.device) -> str:
        """Return the name of the random generator for sums on `device`, and what it is worth."""
        if device.type == "cuda":
            from tacit.training.gpu.available import chacha_rounds, has_triton

            if has_triton():
                return f"cryptographic: ChaCha{chacha_rounds(is_full=self._secure)}"
        return self._key.noise("noise", 0, is_cryptographic=self._secure).name

    def release(
        self,
        sums: Sequence[Tensor],
        scales: Sequence[float],
        *,
        step: int,
        noise_multiplier: float,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> list[Tensor]:
        """Return (sum + noise) / expected batch for each of `sums`; the caller has paid for it.

        The noise on a sum has standard deviation `noise_multiplier` times its scale. The returned
        tensors are valid until the next call. The sums may be overwritten. With `dtypes`, those of
        the CPU are rounded to float32 as they are written, if that is what is asked for.
        """
        if noise_multiplier == 0:
            return [total.to_dense() * (1.0 / self._expected_batch) for total in sums]
        blocks = self.in_place(sums, scales, step=step, noise_multiplier=noise_multiplier)
        if blocks is not None:
            blocks.launch()
            self.launched(step)
            return list(sums)
        return self._release_on_host(sums, scales, step, noise_multiplier, dtypes)

    def in_place(
        self, sums: Sequence[Tensor], scales: Sequence[float], *, step: int, noise_multiplier: float
    ) -> "Blocks | None":
        """Return a GPU kernel, to be launched once, that adds this step's noise to the sums.

        Call `launched` after its launch.

        None without a GPU, without a kernel for these tensors, for zero noise, and for noise so
        small that one record may move a sum beyond the reach of the kernel's noise.
        """
        self._check_process()
        if not sums[0].is_cuda or noise_multiplier == 0:
            return None
        if _REACH + 1 / noise_multiplier > _GPU_REACH:
            return None
        from tacit.training.gpu.available import chacha_rounds, noise_blocks

        grids = self._grids(noise_multiplier, scales, sum(total.numel() for total in sums))
        key = (*grids, *((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in sums))
        if key not in self._blocks:
            rounds = chacha_rounds(is_full=self._secure)
            options = self._block_options(sums, grids)
            self._blocks[key] = noise_blocks(sums, grids, self._factor, rounds, **options)
            if len(self._blocks) > _PLACES:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)  # the least recently used one is dropped first
        blocks = self._blocks[key]
        if blocks is not None:
            # A random nonce: two of 10^6 steps share one with probability 3e-8.
            nonce = int.from_bytes(self._key.bytes("nonce", step, 8), signed=True)
            blocks.set_nonce(self._key.bytes("noise on a GPU", 0, 32), nonce)
        return blocks

    def release_into(
        self,
        parameters: Iterable[nn.Parameter],
        sums: Sequence[Tensor],
        scales: Sequence[float],
        *,
        step: int,
        noise_multiplier: float,
    ) -> None:
        """Set `p.grad` of each parameter to (sum + noise) / expected batch; the caller has paid."""
        parameters = list(parameters)
        dtypes = [p.dtype for p in parameters]
        options = {"step": step, "noise_multiplier": noise_multiplier}
        means = self.release(sums, scales, dtypes=dtypes, **options)
        for parameter, mean in zip(parameters, means, strict=True):
            if isinstance(parameter, DTensor):
                parameter.grad = like_parameter(mean, parameter)
            else:
                parameter.grad = mean.to(parameter.dtype)

    def release_counts(
        self,
        counts: Sequence[float],
        *,
        step: int,
        noise_multiplier: float,
        sensitivity: float,
        purpose: Literal["counts", "loss"] = "counts",
    ) -> list[float]:
        """Return `counts` with noise; one example changes them by at most `sensitivity` in L2.

        Releases of one step that differ in `purpose` have independent noise.
        """
        self._check_process()
        exact = np.asarray(counts, np.float64)
        (grid,) = make_grids(noise_multiplier, [sensitivity], len(exact))
        noisy = np.empty_like(exact)
        source = self._source(purpose, step)
        add_noise([SumOnGrid(exact, grid, noisy)], 1.0, source=source)
        return noisy.tolist()

    def _release_on_host(
        self,
        sums: Sequence[Tensor],
        scales: Sequence[float],
        step: int,
        noise_multiplier: float,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> list[Tensor]:
        """Release sums of any device and dtype; the noise is drawn and added on the CPU."""
        self._check_process()
        grids = self._grids(noise_multiplier, scales, sum(total.numel() for total in sums))
        wanted = [total.dtype for total in sums] if dtypes is None else dtypes
        parts, outs = zip(*map(self._on_host, range(len(sums)), sums, grids, wanted), strict=True)
        add_noise(
            self._with_past(parts, step),
            self._factor,
            source=self._source("noise", step),
            threads=torch.get_num_threads(),
        )
        return [
            out.view(t.shape).to(t.device, d) for out, t, d in zip(outs, sums, wanted, strict=True)
        ]

    def _on_host(
        self, place: int, total: Tensor, grid: NoiseGrid, dtype: torch.dtype
    ) -> tuple[SumOnGrid, Tensor]:
        """Return a sum as one row of float32 or float64 numbers, and the row it is released to.

        That is the memory of the sum if it can be.
        """
        total = total.detach().to("cpu", torch.promote_types(total.dtype, torch.float32))
        kind = dtype if dtype in (torch.float32, torch.float64) else total.dtype
        if total.is_sparse:
            total, out = total.coalesce(), self._row(place, total.numel(), kind)
            rows, values = total.indices()[0].numpy(), total.values().numpy()
            return SumOnGrid(SparseSum(rows, values, 0, len(out)), grid, out.numpy()), out
        flat = total.reshape(-1)
        out = flat if kind == flat.dtype else self._row(place, len(flat), kind)
        return SumOnGrid(flat.numpy(), grid, out.numpy()), out

    def _row(self, place: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return a row of numbers to write to: that of the step before if nothing uses it now."""
        known = self._written.get(place)
        if known is None or known.dtype != dtype or len(known) != size or known.is_used():
            known = self._written[place] = _Row(size, dtype)
        return known.tensor()

    def _with_past(self, parts: Sequence[SumOnGrid], _step: int) -> Sequence[SumOnGrid]:
        """Return the parts of a sum with what earlier steps add to them: nothing."""
        return parts

    def deviation(self, _step: int) -> float:
        """Return the noise's standard deviation on a step's gradient, in units of independent z."""
        return 1.0

    def start_anew(self, step: int) -> None:
        """Forget what was kept between the steps before `step`: nothing, for independent noise."""

    def launched(self, _step: int) -> None:
        """Note that the kernel of `in_place` was launched: of no use for independent noise."""

    def state(self) -> dict[str, object]:
        """Return what is kept between steps, for a replay: nothing, for independent noise."""
        return {}

    def load_state(self, state: dict[str, object]) -> None:
        """Continue a replay from a `state()`."""

    def _block_options(
        self, _sums: Sequence[Tensor], _grids: Sequence[NoiseGrid]
    ) -> dict[str, Any]:  # Any: those of `BandedBlocks`
        """Return the options of the GPU kernel for correlated noise: none."""
        return {}

    def _grids(
        self, noise_multiplier: float, scales: Sequence[float], dimension: int
    ) -> tuple[NoiseGrid, ...]:
        return _known_grids(noise_multiplier, tuple(scales), dimension, len(self._column))

    def _source(self, purpose: str, step: int) -> NoiseWords:
        return self._key.noise(purpose, step, is_cryptographic=self._secure)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "this private run was made in another process, which would draw the same noise. "
                "Make the run after the fork, or save its state_dict() and load it into a new run."
            )


class _Row:
    """Memory for numbers, of which it is known whether any tensor uses it.

    Large gradients take their memory from it: fresh pages cost as much time as the noise in them.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memory = np.empty(size, np.float64 if dtype == torch.float64 else np.float32)
        self._in_use = lambda: None

    def __len__(self) -> int:
        return len(self._memory)

    def is_used(self) -> bool:
        """Return True if a tensor with this memory is left: that of `tensor`, or a view of it."""
        return self._in_use() is not None

    def tensor(self) -> Tensor:
        """Return the memory as a tensor. Its storage, which views share, holds the array here."""
        array = self._memory[:]
        self._in_use = weakref.ref(array)
        return torch.from_numpy(array)


@lru_cache(maxsize=8)
def _known_grids(
    noise_multiplier: float, scales: tuple[float, ...], dimension: int, bands: int
) -> tuple[NoiseGrid, ...]:
    """Return `make_grids` of these numbers, which are those of the step before as a rule."""
    return tuple(make_grids(noise_multiplier, scales, dimension, bands=bands))


def replayed_update(
    noise: NoisyMean,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    is_alone: bool,
) -> "RecordedUpdate | None":
    """Return an update that replays noise and optimizer step as one CUDA graph; None off GPU.

    `is_alone` says that no other rank takes the same steps, so the update need not round exactly as
    theirs does.
    """
    if not parameters[0].is_cuda:
        return None
    from tacit.training.gpu.recorded_update import RecordedUpdate

    return RecordedUpdate(noise, parameters, optimizer, is_alone=is_alone)
