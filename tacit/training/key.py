"""The secret key of a run, from which all its randomness is derived.

The lot drawn at step t, the noise added at step t and the dropout masks of step t are functions of
one secret 32-byte key and of t. So no random number is used twice, a resumed run repeats exactly
the releases it had made, and ranks that share the key agree. The key comes from the operating
system unless the user gives a seed. Anyone who holds the key (or a checkpoint, which contains it)
can subtract the noise: protect the key as well as the data.
"""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tacit._check import whole
from tacit.mechanisms import SecureGenerator, Size


@dataclass(frozen=True)
class Key:
    """The secret key of a run. All random numbers are derived from it with SHAKE-256.

    >>> key = Key.from_seed(7)
    >>> key.numpy("lot", 3).random() == key.numpy("lot", 3).random()
    True
    >>> key.numpy("lot", 3).random() == key.numpy("lot", 4).random()
    False
    """

    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> "Key":
        """Return a key from the operating system's entropy."""
        return cls(os.urandom(32))

    @classmethod
    def from_seed(cls, seed: int | None) -> "Key":
        """Return the key derived from `seed`, or a fresh key if `seed` is None."""
        if seed is None:
            return cls.fresh()
        return cls(hashlib.sha256(f"tacit seed {whole(seed=seed)}".encode()).digest())

    def bytes(self, purpose: str, step: int, size: int, part: int = 0) -> bytes:
        """Return `size` random bytes, different for each combination of purpose, step and part."""
        label = f"|{purpose}|{step}|{part}".encode()
        return hashlib.shake_256(self.secret + label).digest(size)

    def numpy(self, purpose: str, step: int, part: int = 0) -> np.random.Generator:
        """Return a numpy generator for this use, whose whole 256-bit state comes from the key."""
        state = _State(self.bytes(purpose, step, 32, part))
        return np.random.Generator(np.random.PCG64DXSM(state))  # pyright: ignore[reportArgumentType]  # numpy takes any ISeedSequence

    def torch(
        self, purpose: str, step: int, device: torch.device, part: int = 0
    ) -> torch.Generator:
        """Return a torch generator on `device` for this use, seeded from the key.

        On the CPU `manual_seed` keeps only 32 bits, so two of 10^5 steps would share their noise
        with high probability. There the whole 19,968-bit state of the Mersenne Twister is set
        instead. A CUDA generator (Philox) keeps all 64 bits of its seed.
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
        """Return a cryptographic generator for this use: every bit is SHAKE-256 output."""
        return KeyedSecureGenerator(self, purpose, step)


class KeyedSecureGenerator(SecureGenerator):
    """A `SecureGenerator` whose bits are derived from a key, so that they can be repeated."""

    def __init__(self, key: Key, purpose: str, step: int) -> None:
        self._key = key
        self._purpose = purpose
        self._step = step
        self._calls = 0

    def _words(self, size: Size) -> NDArray[np.uint64]:
        shape = () if size is None else (size,) if isinstance(size, int) else tuple(size)
        count = int(np.prod(shape, dtype=np.int64))
        raw = self._key.bytes(self._purpose, self._step, 8 * count, part=self._calls)
        self._calls += 1
        return np.frombuffer(raw, np.uint64).reshape(shape).copy()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global random generators inside the block, and restore them after it."""
    with torch.random.fork_rng(devices=_gpu(device)):
        reseed(seed, device)
        yield


@contextmanager
def randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's, numpy's and Python's global generators from `seed`; restore them afterwards.

    Programs draw from all three: a check that runs a program twice has to repeat them all.
    """
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002  # programs use it
    try:
        with seeded(seed, device):
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002  # the generator that programs share
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002


def reseed(seed: int, device: torch.device) -> None:
    """Seed torch's global random generators: the CPU's and that of `device`."""
    torch.default_generator.manual_seed(seed)
    for index in _gpu(device):
        torch.cuda.default_generators[index].manual_seed(seed)


def _gpu(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


class _State(np.random.bit_generator.ISeedSequence):
    """Random bytes in the form of a numpy seed; numpy takes them unchanged as generator state."""

    def __init__(self, state: bytes) -> None:
        self._words = np.frombuffer(state, np.uint64)

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[np.uint64]:  # type: ignore[override]  # of the one type asked for
        """Return the bytes as words, in the number and type that numpy's PCG64DXSM requires."""
        assert (n_words, dtype) == (len(self._words), np.uint64)
        return self._words


@lru_cache(maxsize=1)
def _mersenne_state() -> NDArray[np.uint8]:
    """Return a CPU generator's state, as a template whose random words are then replaced."""
    return torch.Generator().manual_seed(0).get_state().numpy()
