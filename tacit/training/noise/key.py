"""The secret key of a run, from which all its randomness is derived.

The lot drawn at step t, the noise added at step t and the dropout masks of step t are functions of
one secret 32-byte key and of t. So no random number is used twice in a process, and ranks that
share the key agree. The key comes from the operating system unless the user gives a seed, and ends
with its process: one that resumes a run has another key (`checkpoint`). Anyone who holds a key can
subtract the noise.
"""

import hashlib
import itertools
import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tacit._check import MOST, whole

_LONG = 1 << 15  # words of a sequence that is worth a choice between ways to make them


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
        is_long = isinstance(seed, int) and seed > MOST  # a derived one, of 128 bits
        number = seed if is_long else whole(seed=seed)
        return cls(hashlib.sha256(f"tacit seed {number}".encode()).digest())

    def bind(self, what: str, digest: bytes) -> str:
        """Return `digest` under this key, so that it cannot be compared without the key."""
        label = f"|bind|{what}|".encode()
        return hashlib.shake_256(self.secret + label + digest).hexdigest(16)

    def of_attempt(self, name: str) -> "Key":
        """Return the key of one process that resumes a run with this seed; names are used once."""
        return Key(self.bytes(f"attempt, {name}", 0, 32))

    def bytes(self, purpose: str, step: int, size: int, part: int = 0) -> bytes:
        """Return `size` random bytes, different for each combination of purpose, step and part."""
        label = f"|{purpose}|{step}|{part}".encode()
        return hashlib.shake_256(self.secret + label).digest(size)

    def numpy(self, purpose: str, step: int, part: int = 0) -> np.random.Generator:
        """Return a numpy generator for this use, whose whole 256-bit state comes from the key."""
        state = _State(self.bytes(purpose, step, 32, part))
        return np.random.Generator(np.random.PCG64DXSM(state))  # pyright: ignore[reportArgumentType]  # numpy takes any ISeedSequence

    def noise(self, purpose: str, step: int, *, is_cryptographic: bool = False) -> "NoiseWords":
        """Return the random words of one release's noise, from the best generator installed.

        That is AES-256 in counter mode through the package `cryptography`. Without the package it
        is Philox4x64-10, which is statistical and has a 128-bit key, or SHAKE-256, which is
        cryptographic and slow, if `is_cryptographic` asks for it.
        """
        for kind in (AESWords, PhiloxWords, ShakeWords):
            if kind.is_available() and (kind.is_cryptographic or not is_cryptographic):
                return kind(self.bytes(purpose, step, 32))
        raise AssertionError  # SHAKE-256 is part of Python


class NoiseWords(ABC):
    """Random 64-bit words for noise (`tacit.training.noise.grid_noise`), in numbered sequences.

    All come from one secret of 32 bytes, and no two words share an input of the generator.
    """

    name: str
    is_cryptographic: bool

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @staticmethod
    def is_available() -> bool:
        """Return True if the generator is installed."""
        return True

    def sequence(self, number: int) -> Callable[[int], NDArray[np.uint64]]:
        """Return a function whose calls give so many words each, in the order of sequence `number`.

        Words are made 256 at a time or more, since a call of a generator takes some microseconds.
        """
        more, left = self._stream(number), np.zeros(0, np.uint64)

        def draw(count: int) -> NDArray[np.uint64]:
            nonlocal left
            if count > len(left):  # the few that are left are not used
                left = more(256 * -(-count // 256))
            found, left = left[:count], left[count:]
            return found

        return draw

    @abstractmethod
    def _stream(self, number: int) -> Callable[[int], NDArray[np.uint64]]:
        """Return a function that gives so many new words, a multiple of four, at each call."""


class AESWords(NoiseWords):
    """Words of AES-256 in counter mode: 10 GB/s on a processor with AES instructions, or 24.

    The mode GCM (NIST SP 800-38D) encrypts by counter mode from block 2 on, for a nonce of 96 bits.
    OpenSSL runs it at 2.4 times the speed of plain counter mode on processors with vector AES, and
    at 0.6 times that on others. So long sequences use the faster of the two, which is timed once in
    a process. The words are the same, and GCM's tag is never computed.
    """

    name = "cryptographic: AES-256 in counter mode"
    is_cryptographic = True

    @staticmethod
    def is_available() -> bool:
        """Return True if the package `cryptography` is installed."""
        return _cryptography() is not None

    def _stream(self, number: int) -> Callable[[int], NDArray[np.uint64]]:
        stream, is_new = _counter_mode(self._secret, number), True

        def more(count: int) -> NDArray[np.uint64]:
            nonlocal stream, is_new
            found = np.empty(count + 2, np.uint64)  # the library asks for one more block's room
            begin = 0
            if is_new and count >= _LONG and _is_gcm_faster():
                begin = 4  # blocks 0 and 1, which GCM leaves out
                stream.update_into(_zeros(begin)[: 8 * begin], found.view(np.uint8))
                stream = _gcm(self._secret, number)
            is_new = False
            data = _zeros(count)[: 8 * (count - begin)]
            stream.update_into(data, found[begin:].view(np.uint8))
            return found[:count]

        return more


class PhiloxWords(NoiseWords):
    """Words of Philox4x64-10 (Salmon et al. 2011) under a 128-bit key."""

    name = "statistical: Philox4x64-10, 128-bit key"
    is_cryptographic = False

    def _stream(self, number: int) -> Callable[[int], NDArray[np.uint64]]:
        key = int.from_bytes(self._secret[:16])
        return np.random.Philox(key=key, counter=number << 64).random_raw


class ShakeWords(NoiseWords):
    """Words of SHAKE-256: cryptographic and in Python's standard library, at 0.3 GB/s."""

    name = "cryptographic: SHAKE-256"
    is_cryptographic = True

    def _stream(self, number: int) -> Callable[[int], NDArray[np.uint64]]:
        parts = itertools.count()

        def more(count: int) -> NDArray[np.uint64]:
            label = f"|words|{number}|{next(parts)}".encode()
            found = hashlib.shake_256(self._secret + label).digest(8 * count)
            return np.frombuffer(found, np.uint64)

        return more


@lru_cache(maxsize=1)
def _cryptography() -> Any:  # Any: a module, or None
    """Return the ciphers of the package `cryptography`; None if it is not installed."""
    try:
        from cryptography.hazmat.primitives import ciphers
    except ImportError:
        return None
    return ciphers


def _counter_mode(secret: bytes, number: int) -> Any:  # Any: a cipher context
    """Return AES-256 in counter mode from block `number` 2^64 on."""
    ciphers = _cryptography()
    counter = ciphers.modes.CTR((number << 64).to_bytes(16))
    return ciphers.Cipher(ciphers.algorithms.AES(secret), counter).encryptor()


def _gcm(secret: bytes, number: int) -> Any:  # Any: a cipher context
    """Return AES-256 in counter mode from block `number` 2^64 + 2 on, at most 2^32 - 2 blocks."""
    ciphers = _cryptography()
    nonce = ciphers.modes.GCM((number << 32).to_bytes(12))
    return ciphers.Cipher(ciphers.algorithms.AES(secret), nonce).encryptor()


@lru_cache(maxsize=1)
def _is_gcm_faster() -> bool:
    """Time both ways to the same words, on a key of no use."""
    found, times = np.empty(_LONG + 2, np.uint64), {_counter_mode: math.inf, _gcm: math.inf}
    for _ in range(5):
        for way in times:
            stream = way(bytes(32), 0)
            start = time.perf_counter()
            stream.update_into(_zeros(_LONG)[: 8 * _LONG], found.view(np.uint8))
            times[way] = min(times[way], time.perf_counter() - start)
    return times[_gcm] < times[_counter_mode]


def _zeros(count: int) -> memoryview:
    """Return at least `count` words of zeros, to be encrypted."""
    return _many_zeros(max(1 << 15, 1 << (count - 1).bit_length()))


@lru_cache(maxsize=4)
def _many_zeros(count: int) -> memoryview:
    return memoryview(bytes(8 * count))


@contextmanager
def randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's, numpy's and Python's global generators from `seed`; restore them afterwards.

    Programs draw from all three, so a step that is repeated has to repeat them all.
    """
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002  # programs use it
    try:
        with torch.random.fork_rng(devices=_gpu(device)):
            reseed(seed, device)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002


def reseed(seed: int, device: torch.device) -> None:
    """Seed the global generators of Python, numpy and torch: the CPU's and that of `device`."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002  # the one that programs share
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
