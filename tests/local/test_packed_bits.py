"""Packed bits: counting columns equals summing the unpacked rows."""

import numpy as np
import pytest

from tacit.local.packed_bits import column_counts, pack, row_bytes, unpack


@pytest.mark.parametrize("n_rows", [0, 1, 254, 255, 256, 5000])
@pytest.mark.parametrize("n_bits", [1, 7, 64, 65, 130])
def test_counts_equal_the_sum_of_unpacked_rows(n_rows, n_bits):
    bits = np.random.default_rng(n_rows).random((n_rows, n_bits)) < 0.3
    packed = pack(bits)
    assert packed.shape == (n_rows, row_bytes(n_bits))
    assert np.array_equal(unpack(packed, n_bits), bits)
    assert np.array_equal(column_counts(packed, n_bits), bits.sum(axis=0))


def test_full_rows_do_not_overflow():
    assert column_counts(pack(np.ones((10_000, 3), dtype=bool)), 3).tolist() == [10_000] * 3
    # Rows so wide that none are laid side by side: the bytes of the sums are full after 255.
    wide = np.ones((600, 40_000), dtype=bool)
    assert (column_counts(pack(wide), 40_000) == 600).all()
