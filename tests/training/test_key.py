"""The run's key and torch's global generators."""

import numpy as np
import pytest
import torch

from tacit.training.noise import key as key_module
from tacit.training.noise.key import AESWords, Key, PhiloxWords, ShakeWords, randomness

CPU = torch.device("cpu")


def drawn(kind, number, *counts):
    draw = kind(bytes(range(32))).sequence(number)
    return np.concatenate([draw(count) for count in counts])


@pytest.mark.parametrize("kind", [AESWords, PhiloxWords, ShakeWords])
def test_sequences_of_words_repeat_and_share_no_word(kind):
    if not kind.is_available():
        pytest.skip("the generator is not installed")
    assert np.array_equal(drawn(kind, 3, 300, 700), drawn(kind, 3, 300, 700))
    found = [drawn(kind, number, 4096, 4096, 5) for number in (0, 1, 2, 2**40)]
    assert len(np.unique(np.concatenate(found))) == 4 * 8197
    ones = np.unpackbits(np.concatenate(found).view(np.uint8)).reshape(-1, 64).sum(0, dtype=int)
    # Each of 64 bits is one in half of 32,788 words; false-alarm probability 1e-7.
    assert np.abs(ones - 2 * 8197).max() < 6.1 * np.sqrt(8197)


def test_the_words_of_aes_are_those_of_the_standard(monkeypatch):
    """FIPS 197, appendix C.3: the block cipher itself; counter mode encrypts the counters."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    secret = bytes(range(32))
    plain = ciphers.Cipher(ciphers.algorithms.AES(secret), ciphers.modes.ECB()).encryptor()
    assert plain.update(bytes.fromhex("00112233445566778899aabbccddeeff")).hex() == (
        "8ea2b7ca516745bfeafc49904b496089"
    )
    blocks = b"".join(plain.update(((5 << 64) + i).to_bytes(16)) for i in range(128))
    assert drawn(AESWords, 5, 256).tobytes() == blocks


@pytest.mark.parametrize("is_gcm_faster", [True, False])
def test_both_modes_of_aes_give_the_words_of_counter_mode(is_gcm_faster, monkeypatch):
    """However the words are asked for, at either way's choice: no block is left out or repeated."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    secret, asked = bytes(range(32)), []
    monkeypatch.setattr(key_module, "_is_gcm_faster", lambda: asked.append(1) or is_gcm_faster)
    splits = [(1 << 15, 1 << 15, 256), (1 << 16, 5, 300, 1 << 15), (1 << 19,), (5, 1 << 15), (700,)]
    for number in (0, 7, 2**62 + 1):
        modes, count = ciphers.modes, 1 << 19
        counter = modes.CTR((number << 64).to_bytes(16))
        stream = ciphers.Cipher(ciphers.algorithms.AES(secret), counter).encryptor()
        words = np.frombuffer(stream.update(bytes(8 * count)), np.uint64)
        for split in splits:
            assert np.array_equal(drawn(AESWords, number, *split), in_counter_mode(words, *split))
    assert asked


def in_counter_mode(words, *counts):
    """The words of draws of so many: made 256 at a time or more, and the few left are not used."""
    place, left, found = 0, words[:0], []
    for count in counts:
        if count > len(left):
            made = 256 * -(-count // 256)
            left, place = words[place : place + made], place + made
        found.append(left[:count])
        left = left[count:]
    return np.concatenate(found)


def test_the_faster_mode_is_chosen_once(monkeypatch):
    pytest.importorskip("cryptography")
    key_module._is_gcm_faster.cache_clear()
    assert key_module._is_gcm_faster() in (True, False)
    monkeypatch.setattr(key_module, "_gcm", None)  # would fail
    key_module._is_gcm_faster()


def test_the_best_generator_is_chosen_and_named(monkeypatch):
    key = Key.from_seed(1)
    if AESWords.is_available():
        assert key.noise("noise", 0).name == "cryptographic: AES-256 in counter mode"
    monkeypatch.setattr(AESWords, "is_available", staticmethod(lambda: False))
    assert key.noise("noise", 0).name == "statistical: Philox4x64-10, 128-bit key"
    assert key.noise("noise", 0, is_cryptographic=True).name == "cryptographic: SHAKE-256"


def test_the_secret_is_not_shown():
    assert "secret" not in repr(Key.from_seed(1))
    assert Key.from_seed(1).secret.hex() not in repr(Key.from_seed(1))


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_a_seed_must_be_a_whole_number(seed):
    with pytest.raises((ValueError, TypeError), match="seed"):
        Key.from_seed(seed)


def test_seeding_leaves_the_users_stream_alone():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with randomness(5, CPU):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with randomness(5, CPU):
        assert torch.equal(torch.rand(2), first)
