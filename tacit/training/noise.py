"""The one noisy release of a training step: (clipped sum + noise) / expected batch."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tacit.mechanisms import GaussianMechanism, GridGaussianMechanism
from tacit.training.clip import call_each
from tacit.training.distributed import like_parameter
from tacit.training.key import Key

if TYPE_CHECKING:
    from tacit.training.gpu import RecordedUpdate
    from tacit.training.gpu.noise import Blocks

_PLACES = 4  # number of buffer addresses whose launch parameters are cached (LRU)
_FEW = 1 << 12  # so many normals take less time than setting up torch's generator
_CHUNK = 1 << 18  # normals drawn from one generator on the CPU: fixed, so threads do not matter


class NoisyMean:
    """Turns a clipped sum into the released gradient: (sum + noise) / expected_batch.

    Guarantee: `events.Gaussian(noise_multiplier)` per call, if the scales fit the clip rule: with
    g_p one example's clipped contribution to parameter p, sum_p |g_p|^2 / scale_p^2 <= 1. In
    coordinates divided by their scale the sum has L2 sensitivity 1 and the noise is
    N(0, noise_multiplier^2 I). For flat clipping every scale is the clip norm.

    With `secure`, noise comes from a cryptographic generator and the sum is released on a grid
    (`GridGaussianMechanism`), which closes the floating-point channel of Mironov 2012; division
    and rounding to the parameter's type come after the release and are post-processing. Not closed
    is the rounding inside the floating-point sum itself (Casacuberta et al. 2022,
    arXiv:2207.10635).
    """

    def __init__(self, key: Key, *, expected_batch: float, secure: bool = False) -> None:
        self._key = key
        self._expected_batch = expected_batch
        self._secure = secure
        self._buffers: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}
        self._blocks: OrderedDict[Any, Blocks | None] = OrderedDict()

    def use(self, key: Key) -> None:
        """Draw noise from this key from now on."""
        self._key = key

    def release(
        self, sums: Sequence[Tensor], scales: Sequence[float], *, step: int, noise_multiplier: float
    ) -> list[Tensor]:
        """Return noisy means in the shapes of `sums`; the caller has paid for them.

        The means stay valid until the next call. The sums may be overwritten.
        """
        factor = 1.0 / self._expected_batch  # declared: the drawn size is private
        if noise_multiplier == 0:
            return [total * factor for total in sums]
        if self._secure:
            return self._grid_release(sums, scales, step, noise_multiplier)
        blocks = self.in_place(sums, scales, step=step, noise_multiplier=noise_multiplier)
        if blocks is not None:
            blocks.launch()
            return list(sums)
        views = self._normals(sums, [noise_multiplier * scale * factor for scale in scales], step)
        call_each("add_", views, sums, alpha=factor)
        return views

    def in_place(
        self, sums: Sequence[Tensor], scales: Sequence[float], *, step: int, noise_multiplier: float
    ) -> "Blocks | None":
        """Return the GPU kernel that adds this step's noise to the sums in place, to launch once.

        None without a GPU, without a kernel for these tensors, or if no such noise is wanted.
        """
        if not sums[0].is_cuda or self._secure or noise_multiplier == 0:
            return None
        from tacit.training import gpu

        factor = 1.0 / self._expected_batch
        stds = tuple(noise_multiplier * scale * factor for scale in scales)
        key = (stds, *((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in sums))
        if key not in self._blocks:
            self._blocks[key] = gpu.noise_blocks(sums, stds, factor)
            if len(self._blocks) > _PLACES:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)  # the least recently used one is dropped first
        blocks = self._blocks[key]
        if blocks is not None:
            blocks.set_key(int.from_bytes(self._key.bytes("noise", step, 8)))
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
        """Put the noisy means into `p.grad` of the parameters; the caller has paid for them."""
        means = self.release(sums, scales, step=step, noise_multiplier=noise_multiplier)
        for parameter, mean in zip(parameters, means, strict=True):
            if isinstance(parameter, DTensor):
                parameter.grad = like_parameter(mean, parameter)
            else:
                parameter.grad = mean.to(parameter.dtype)

    def release_counts(
        self, counts: Sequence[float], *, step: int, noise_multiplier: float, sensitivity: float
    ) -> list[float]:
        """Return counts with noise; one example moves them by at most `sensitivity` in L2."""
        kind = GridGaussianMechanism if self._secure else GaussianMechanism
        size = {"dimension": len(counts)} if self._secure else {}
        mechanism = kind(noise_multiplier, l2_sensitivity=sensitivity, **size)
        rng = self._key.secure if self._secure else self._key.numpy
        return mechanism.release(np.asarray(counts, float), rng("counts", step)).tolist()

    def _normals(self, sums: Sequence[Tensor], stds: Sequence[float], step: int) -> list[Tensor]:
        """Return normals in the shapes of `sums`, with these standard deviations.

        There is one flat draw per device and dtype.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, total in enumerate(sums):
            dtype = torch.promote_types(total.dtype, torch.float32)
            groups.setdefault((total.device, dtype), []).append(i)
        views: list[Tensor] = [torch.empty(0)] * len(sums)
        for part, ((device, dtype), members) in enumerate(groups.items()):
            sizes = [sums[i].numel() for i in members]
            place = (device, dtype, sum(sizes))
            if place not in self._buffers:
                # Kept between steps: on a CPU, fresh memory pages cost as much as the draw.
                self._buffers[place] = torch.empty(sum(sizes), device=device, dtype=dtype)
            flat = self._buffers[place]
            common = {stds[i] for i in members}
            std = common.pop() if len(common) == 1 else 1.0  # scaled while drawn: one pass less
            _fill_normal(flat, self._key, step, part, std)
            for i, view in zip(members, flat.split(sizes), strict=True):
                views[i] = view.view(sums[i].shape)
                if common:
                    view.mul_(stds[i])
        return views

    def _grid_release(
        self, sums: Sequence[Tensor], scales: Sequence[float], step: int, noise_multiplier: float
    ) -> list[Tensor]:
        sizes = [total.numel() for total in sums]
        pairs = zip(sums, scales, strict=True)
        flat = torch.cat([total.detach().double().cpu().flatten() / s for total, s in pairs])
        # One example moves the scaled sum by at most 1 in L2 norm: the scales fit the clip rule.
        mechanism = GridGaussianMechanism(
            noise_multiplier, l2_sensitivity=1.0, dimension=max(1, flat.numel())
        )
        noisy = torch.from_numpy(mechanism.release(flat.numpy(), self._key.secure("noise", step)))
        return [
            (part * (scale / self._expected_batch)).view(total.shape).to(total)
            for part, total, scale in zip(noisy.split(sizes), sums, scales, strict=True)
        ]


def replayed_update(
    noise: NoisyMean,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    is_alone: bool,
) -> "RecordedUpdate | None":
    """Return noise and the optimizer's step as one CUDA graph, or None without a GPU.

    `is_alone`: no other rank takes the same steps, so the update may round in its own way.
    """
    if not parameters[0].is_cuda:
        return None
    from tacit.training import gpu

    return gpu.RecordedUpdate(noise, parameters, optimizer, is_alone=is_alone)


def _fill_normal(flat: Tensor, key: Key, step: int, part: int, std: float) -> None:
    """Fill `flat` with normals; on the CPU in chunks with a generator each, by threads."""
    if flat.device.type != "cpu":
        flat.normal_(std=std, generator=key.torch("noise", step, flat.device, part))
        return
    if flat.numel() <= _FEW and flat.dtype == torch.float32:
        few = key.numpy("noise", step, part * 2**32).standard_normal(flat.numel(), np.float32)
        torch.mul(torch.from_numpy(few), std, out=flat)
        return
    chunks = flat.split(_CHUNK)

    def fill(i: int) -> None:
        chunks[i].normal_(
            std=std, generator=key.torch("noise", step, flat.device, part * 2**32 + i)
        )

    threads = min(torch.get_num_threads(), len(chunks))
    if threads < 2:
        for i in range(len(chunks)):
            fill(i)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, range(len(chunks))))
