"""The run's key and torch's global generators."""

import numpy as np
import pytest
import torch

from tacit.training.key import Key, seeded

CPU = torch.device("cpu")


def test_the_cpu_generator_is_not_reduced_to_32_bits_of_seed():
    states = [Key.from_seed(1).torch("noise", t, torch.device("cpu")).get_state() for t in (0, 1)]
    words = [state.numpy()[24 : 24 + 8 * 624].view(np.uint64) for state in states]
    assert len(np.unique(np.concatenate(words))) > 1240
    assert words[0].max() < 2**32


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
    with seeded(5, CPU):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with seeded(5, CPU):
        assert torch.equal(torch.rand(2), first)
