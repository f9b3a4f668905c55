"""The run's key and torch's global generators."""

import numpy as np
import pytest
import torch

from tacit.training.key import AESWords, Key, PhiloxWords, ShakeWords, randomness

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
