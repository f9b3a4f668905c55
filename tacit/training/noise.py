"""The one noisy release of a training step, and the keyed randomness behind it.

All randomness of a run is a function of one secret 32-byte key and the step's number: the lot drawn
at step t, the noise added at step t. So nothing repeats between steps, parameters or purposes, a
resumed run repeats the very releases it had made, and ranks that share the key agree. The key comes
from the operating system unless the user gives a seed. Who holds the key (or a checkpoint, which
contains it) can subtract the noise: keep it as close as the data.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from tacit._check import whole
from tacit.mechanisms import GaussianMechanism, GridGaussianMechanism, SecureGenerator, Size
from tacit.training import gpu

_PLACES = 4  # where sums lie in turn that are remembered: of a lot in one part, and in several
_FEW = 1 << 12  # normals that take less time than to set up torch's generator
_CHUNK = 1 << 18  # normals drawn from one generator on the CPU: fixed, so threads do not matter


@dataclass(frozen=True)
class Key:
    """Secret from which a run's randomness is derived; SHAKE-256 is the derivation.

    >>> key = Key.from_seed(7)
    >>> key.numpy("lot", 3).random() == key.numpy("lot", 3).random()
    True
    >>> key.numpy("lot", 3).random() == key.numpy("lot", 4).random()
    False
    """

    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> "Key":
        """A key from the operating system's entropy."""
        return cls(os.urandom(32))

    @classmethod
    def from_seed(cls, seed: int | None) -> "Key":
        """The key of a reproducible run, or a fresh one for None."""
        if seed is None:
            return cls.fresh()
        return cls(hashlib.sha256(f"tacit seed {whole(seed=seed)}".encode()).digest())

    def bytes(self, purpose: str, step: int, size: int, part: int = 0) -> bytes:
        """`size` bytes that belong to `purpose`, `step` and `part` alone."""
        label = f"|{purpose}|{step}|{part}".encode()
        return hashlib.shake_256(self.secret + label).digest(size)

    def numpy(self, purpose: str, step: int, part: int = 0) -> np.random.Generator:
        """A fast numpy generator, whose whole state of 256 bits is taken from the key."""
        state = _State(self.bytes(purpose, step, 32, part))
        return np.random.Generator(np.random.PCG64DXSM(state))  # pyright: ignore[reportArgumentType]  # numpy takes any ISeedSequence

    def torch(self, purpose: str, step: int, device: torch.device, part: int = 0):
        """A torch generator on `device`.

        `manual_seed` keeps only 32 bits on the CPU, so two of 10^5 steps would share their noise
        with high probability: there the whole 19,968-bit Mersenne Twister state is set instead. A
        CUDA generator (Philox) keeps all 64 bits.
        """
        generator = torch.Generator(device)
        if device.type != "cpu":
            return generator.manual_seed(int.from_bytes(self.bytes(purpose, step, 8, part)[:8]))
        state = _mersenne_state().copy()
        words = np.frombuffer(self.bytes(purpose, step, 4 * 624, part), np.uint32)
        # Layout: seed, (left, seeded), next, 624 words in 64 bits each, then cached normals.
        state[24 : 24 + 8 * 624] = words.astype(np.uint64).view(np.uint8)
        return generator.set_state(torch.from_numpy(state))

    def secure(self, purpose: str, step: int) -> "KeyedSecureGenerator":
        """A cryptographic generator: every bit is SHAKE-256 output."""
        return KeyedSecureGenerator(self, purpose, step)


class _State(np.random.bit_generator.ISeedSequence):
    """Random bytes as a seed. They need no mixing, which is what numpy's own sequence would do."""

    def __init__(self, state: bytes) -> None:
        self._words = np.frombuffer(state, np.uint64)

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[np.uint64]:  # type: ignore[override]  # of the one type asked for
        """All words, as PCG64DXSM asks for them."""
        assert (n_words, dtype) == (len(self._words), np.uint64)
        return self._words


class KeyedSecureGenerator(SecureGenerator):
    """`SecureGenerator` whose bits are a cryptographic function of a key: they can be replayed."""

    def __init__(self, key: Key, purpose: str, step: int) -> None:
        self._key, self._purpose, self._step, self._calls = key, purpose, step, 0

    def _words(self, size: Size) -> NDArray[np.uint64]:
        shape = () if size is None else (size,) if isinstance(size, int) else tuple(size)
        count = int(np.prod(shape, dtype=np.int64))
        raw = self._key.bytes(self._purpose, self._step, 8 * count, part=self._calls)
        self._calls += 1
        return np.frombuffer(raw, np.uint64).reshape(shape).copy()


class NoisyMean:
    """Turns the clipped sum into what is released: (sum + noise) / expected_batch.

    Guarantee: `events.Gaussian(noise_multiplier)` per call, given the scales' contract: if one
    example's clipped contribution to parameter p is g_p, then sum_p |g_p|^2 / scale_p^2 <= 1. In
    coordinates divided by their scale the sum has L2 sensitivity 1 and the noise is
    N(0, noise_multiplier^2 I) there. For flat clipping every scale is the clip norm.

    With `secure`, noise comes from a cryptographic generator and the sum is released on a grid
    (`GridGaussianMechanism`), which closes the floating-point channel of Mironov 2012; division
    and rounding to the parameter's type come after the release and are post-processing. What stays
    open is the rounding inside the floating-point sum itself (Casacuberta et al. 2022,
    arXiv:2207.10635).
    """

    def __init__(self, key: Key, *, expected_batch: float, secure: bool = False) -> None:
        self._key, self._expected_batch, self._secure = key, expected_batch, secure
        self._buffers: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}
        self._blocks: OrderedDict[Any, gpu.noise.Blocks | None] = OrderedDict()

    def use(self, key: Key) -> None:
        """Draw by this key from now on."""
        self._key = key

    def release(
        self,
        sums: Sequence[Tensor],
        scales: Sequence[float],
        *,
        step: int,
        noise_multiplier: float,
    ) -> list[Tensor]:
        """Noisy means in the shapes of `sums`; pay first. They stay valid until the next call.

        The sums themselves may be overwritten.
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
        torch._foreach_add_(views, list(sums), alpha=factor)  # pyright: ignore[reportPrivateImportUsage]  # as torch.optim does
        return views

    def in_place(
        self,
        sums: Sequence[Tensor],
        scales: Sequence[float],
        *,
        step: int,
        noise_multiplier: float,
    ) -> "gpu.noise.Blocks | None":
        """The release on a GPU, where the sums lie, with this step's key set: launch it once.

        None where there is no kernel for it, or it is not wanted.
        """
        if not sums[0].is_cuda or self._secure or noise_multiplier == 0:
            return None
        factor = 1.0 / self._expected_batch
        stds = tuple(noise_multiplier * scale * factor for scale in scales)
        key = (stds, *((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in sums))
        if key not in self._blocks:
            self._blocks[key] = gpu.noise_blocks(sums, stds, factor)
            if len(self._blocks) > _PLACES:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)  # those not used for long go first
        blocks = self._blocks[key]
        if blocks is not None:
            blocks.set_key(int.from_bytes(self._key.bytes("noise", step, 8)))
        return blocks

    def release_counts(
        self, counts: Sequence[float], *, step: int, noise_multiplier: float, sensitivity: float
    ) -> list[float]:
        """Counts plus noise of their own; one example moves them by at most `sensitivity` in L2."""
        kind = GridGaussianMechanism if self._secure else GaussianMechanism
        size = {"dimension": len(counts)} if self._secure else {}
        mechanism = kind(noise_multiplier, l2_sensitivity=sensitivity, **size)
        rng = self._key.secure if self._secure else self._key.numpy
        return mechanism.release(np.asarray(counts, float), rng("counts", step)).tolist()

    def _normals(self, sums: Sequence[Tensor], stds: Sequence[float], step: int) -> list[Tensor]:
        """One flat draw per device and dtype, cut into the shapes of `sums`, with these stds."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, total in enumerate(sums):
            dtype = torch.promote_types(total.dtype, torch.float32)
            groups.setdefault((total.device, dtype), []).append(i)
        views: list[Tensor] = [torch.empty(0)] * len(sums)
        for part, ((device, dtype), members) in enumerate(groups.items()):
            sizes = [sums[i].numel() for i in members]
            flat = self._buffer(device, dtype, sum(sizes))
            common = {stds[i] for i in members}
            std = common.pop() if len(common) == 1 else 1.0  # scaled while drawn: one pass less
            _fill_normal(flat, self._key, step, part, std)
            for i, view in zip(members, flat.split(sizes), strict=True):
                views[i] = view.view(sums[i].shape)
                if common:
                    view.mul_(stds[i])
        return views

    def _buffer(self, device: torch.device, dtype: torch.dtype, size: int) -> Tensor:
        # Kept between steps: fresh pages cost as much as the draw on a CPU.
        place = (device, dtype, size)
        if place not in self._buffers:
            self._buffers[place] = torch.empty(size, device=device, dtype=dtype)
        return self._buffers[place]

    def _grid_release(
        self, sums: Sequence[Tensor], scales: Sequence[float], step: int, noise_multiplier: float
    ) -> list[Tensor]:
        sizes = [total.numel() for total in sums]
        pairs = zip(sums, scales, strict=True)
        flat = torch.cat([total.detach().double().cpu().flatten() / s for total, s in pairs])
        # One example moves the scaled sum by at most 1 in L2 norm (contract of the scales).
        mechanism = GridGaussianMechanism(
            noise_multiplier, l2_sensitivity=1.0, dimension=max(1, flat.numel())
        )
        noisy = torch.from_numpy(mechanism.release(flat.numpy(), self._key.secure("noise", step)))
        return [
            (part * (scale / self._expected_batch)).view(total.shape).to(total)
            for part, total, scale in zip(noisy.split(sizes), sums, scales, strict=True)
        ]


@lru_cache(maxsize=1)
def _mersenne_state() -> NDArray[np.uint8]:
    """The state of a newly seeded CPU generator, whose words are to be replaced."""
    return torch.Generator().manual_seed(0).get_state().numpy()


def _fill_normal(flat: Tensor, key: Key, step: int, part: int, std: float) -> None:
    """Normals into `flat`; on the CPU in chunks, each with its own generator, by threads."""
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
