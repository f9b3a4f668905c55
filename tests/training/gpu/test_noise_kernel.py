"""The noise kernel: its generator and arithmetic on any machine, its law on a GPU."""

import numpy as np
import pytest
import triton_emulation as emulation
from scipy.stats import chi2

FALSE_ALARM = 1e-6


@pytest.fixture
def kernel(monkeypatch):
    return emulation.emulated(monkeypatch)


def words(kernel, secret, nonce, counters, rounds):
    key = emulation.Pointer(np.frombuffer(secret, np.int32))
    with np.errstate(over="ignore"):
        nonce = emulation.lanes(nonce, np.int64)
        block = kernel.chacha(key, nonce, emulation.lanes(counters, np.int64), rounds)
    return np.array(block)  # (16, lanes)


def test_the_generator_is_chacha20_of_the_standard(kernel):
    """RFC 8439, section 2.3.2: its first nonce word is our counter's upper half."""
    counter = (0x09000000 << 32) | 1
    nonce = (0x00000000 << 32) | 0x4A000000
    found = words(kernel, bytes(range(32)), nonce, [counter], 20)[:, 0]
    expected = (
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
    )
    assert [f"{word:08x}" for word in found] == expected.split()


@pytest.mark.parametrize("rounds", [12, 20])
def test_the_generator_agrees_with_a_plain_one(kernel, rounds):
    secret, nonce = bytes(range(100, 132)), 2**40 + 17
    counters = [0, 1, 2**32 - 1, 2**32, 2**62 + 5]
    found = words(kernel, secret, nonce, counters, rounds)
    for lane, counter in enumerate(counters):
        assert found[:, lane].tolist() == plain_chacha(secret, counter, nonce, rounds)


def plain_chacha(secret, counter, nonce, rounds):
    """ChaCha with Python integers, from Bernstein 2008."""
    key = [int.from_bytes(secret[i : i + 4], "little") for i in range(0, 32, 4)]
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *key]
    start += [counter % 2**32, counter >> 32, nonce % 2**32, nonce >> 32]
    x = list(start)

    def turn(a, b, c, d):
        for p, q, r, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[p] = (x[p] + x[q]) % 2**32
            mixed = x[r] ^ x[p]
            x[r] = (mixed << bits | mixed >> (32 - bits)) % 2**32

    for _ in range(rounds // 2):
        for i in range(4):
            turn(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            turn(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return [(a + b) % 2**32 for a, b in zip(x, start, strict=True)]


def exact_pair(first, second, further):
    """The same two numbers in 60 decimal digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        whole, bits = int(first) >> 1, 63
        if whole < 2**48:
            whole, bits = max(1, whole << 64 | int(further)), 127
        radius = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(whole) / 2**bits))
        signed = int(np.int64(np.uint64(second))) >> 2
        angle = mpmath.pi / 4 * (1 + mpmath.mpf(signed) / 2**61)
        a, b = radius * mpmath.sin(angle), radius * mpmath.cos(angle)
        return (-a if second & 1 else a), (-b if second & 2 else b)


CORNERS = [0, 1, 2, 2**20, 2**48, 2**49 - 1, 2**49, 2**49 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
           2**64 - 2, 2**64 - 4, 2**64 - 2**12, 2**64 - 2**30, 2**64 - 2**50]  # fmt: skip


def test_the_error_of_a_number_is_far_below_a_grid_step(kernel):
    rng = np.random.default_rng(0)
    first = np.concatenate([np.array(CORNERS, np.uint64), rng.integers(0, 2**64, 300, np.uint64)])
    second = rng.integers(0, 2**64, len(first), np.uint64)
    second[: len(CORNERS)] = np.roll(first[: len(CORNERS)], 5)
    further = rng.integers(0, 2**64, len(first), np.uint64)
    further[:3] = 0, 0, 2**64 - 1
    with np.errstate(over="ignore"):
        found = kernel.normal_pair(*(emulation.lanes(w) for w in (first, second, further)))
    for i, triple in enumerate(zip(first, second, further, strict=True)):
        for have, want in zip(found, exact_pair(*map(int, triple)), strict=True):
            assert abs(float(have[i] - want)) <= 2.0**-48  # a grid step is 2^-29 or more
            assert np.isfinite(have[i])
    largest = np.sqrt(found[0] ** 2 + found[1] ** 2).max()
    assert 13.2 < largest < 13.3  # of u = 2^-127


def test_words_of_all_zeros_and_ones_are_numbers(kernel):
    ends = emulation.lanes([0, 2**64 - 1], np.uint64)
    with np.errstate(over="ignore"):
        for second in (ends, ends[::-1]):
            for further in (ends, ends[::-1]):
                assert np.isfinite(kernel.normal_pair(ends, second, further)).all()


def test_eight_numbers_of_each_lane_have_the_normal_law(kernel):
    key = emulation.Pointer(np.frombuffer(bytes(range(32)), np.int32))
    counters = emulation.lanes(np.arange(20_000), np.int64)
    with np.errstate(over="ignore"):
        z = np.array(kernel.normals(key, emulation.lanes(3, np.int64), counters, 12))
    assert z.shape == (8, 20_000)
    tail = FALSE_ALARM / 2 / 8
    squares = (z**2).sum(1)
    assert (squares > chi2.ppf(tail, z.shape[1])).all()
    assert (squares < chi2.isf(tail, z.shape[1])).all()
    products = (z @ z.T)[np.triu_indices(8, 1)] / np.sqrt(z.shape[1])
    assert np.abs(products).max() < 6.0
    assert np.abs(z.sum(1)).max() < 6.0 * np.sqrt(z.shape[1])


def test_a_small_uniform_number_takes_further_bits(kernel):
    """The branch for small u is taken by all lanes of a block, and changes only those."""
    key = emulation.Pointer(np.frombuffer(bytes(range(32)), np.int32))
    nonce = emulation.lanes(0, np.int64)
    counters = np.arange(40_000)
    block = words(kernel, bytes(range(32)), 0, counters, 12)
    small = np.flatnonzero((block[[0, 4, 8, 12]] < 2**17).any(0))
    assert 1 <= small.size < 40
    with np.errstate(over="ignore"):
        together = kernel.normals(key, nonce, emulation.lanes(counters, np.int64), 12)
        alone = kernel.normals(key, nonce, emulation.lanes(np.setdiff1d(counters, small)), 12)
    apart = np.array(together)[:, np.setdiff1d(counters, small)]
    assert np.array_equal(apart, np.array(alone))
    assert (np.abs(np.array(together)[:, small]).max(0) > 0).all()
