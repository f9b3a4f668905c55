"""The sizes to which microbatches are padded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit.training.padding import Padding, _rows_and_microbatches, choose_padding

sizes = st.integers(1, 300).flatmap(
    lambda large: st.one_of(
        st.just((large,)), st.integers(1, large).map(lambda small: (large, small))
    )
)


@given(n=st.integers(1, 5000), sizes=sizes, overhead=st.floats(0, 100))
def test_a_cover_holds_every_record_and_no_microbatch_is_all_padding(n, sizes, overhead):
    cover = Padding(sizes, overhead).cover(n)
    assert sum(cover) >= n
    assert set(cover) <= set(sizes)
    assert sum(cover[:-1]) < n


@given(n=st.integers(1, 5000), sizes=sizes, overhead=st.floats(0, 100))
def test_the_choice_counts_what_a_cover_computes(n, sizes, overhead):
    padding = Padding(sizes, overhead)
    rows, microbatches = _rows_and_microbatches(np.array([n]), padding)
    cover = padding.cover(n)
    assert (rows[0], microbatches[0]) == (sum(cover), len(cover))


@given(sizes=sizes, limit=st.integers(1, 300))
def test_a_lower_limit_is_kept(sizes, limit):
    lowered = Padding(sizes).within(limit).sizes
    assert max(lowered) <= limit
    assert len(set(lowered)) == len(lowered) or sizes == lowered


@pytest.mark.parametrize("expected", [32, 50, 100, 333, 1024, 4096, 20_000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("parts", [0.5, 1.0, 3.7])
def test_few_rows_are_padding(expected, share, parts):
    limit = int(expected / parts)
    padding = choose_padding(expected, expected**0.5, limit=limit, overhead=share * expected)
    lots = np.random.default_rng(0).poisson(expected, 4000)
    rows, _ = _rows_and_microbatches(lots, padding)
    assert max(padding.sizes) <= limit
    assert rows.sum() / lots.sum() <= 1.08


def test_lots_of_one_size_have_no_padding():
    assert choose_padding(100, 0.0, limit=30, overhead=1.0).sizes == (25,)
    assert choose_padding(32, 0.0, limit=100, overhead=1.0).sizes == (32,)
