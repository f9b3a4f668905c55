"""The sizes to which microbatches are padded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit.training.lots.padding import Padding, choose_padding

paddings = st.integers(1, 300).flatmap(
    lambda limit: st.builds(
        Padding, multiple=st.integers(1, limit), limit=st.just(limit), spread=st.integers(1, limit)
    )
)


@given(n=st.integers(1, 5000), padding=paddings)
def test_a_cover_has_room_for_balanced_parts(n, padding):
    for chosen in (padding, padding.with_few_sizes()):
        cover = chosen.cover(n)
        parts = [len(part) for part in np.array_split(np.arange(n), len(cover))]
        assert all(rows >= part > 0 for rows, part in zip(cover, parts, strict=True))
        assert max(cover) <= chosen.limit
        assert max(cover) - min(cover) <= max(2, chosen.multiple)
        assert all(rows % chosen.multiple == 0 or rows == 2 for rows in cover)


def test_an_empty_lot_has_no_microbatch():
    assert Padding(multiple=4, limit=8).cover(0) == []


@given(padding=paddings, limit=st.integers(1, 300), n=st.integers(1, 500))
def test_a_lower_limit_is_kept(padding, limit, n):
    assert max(padding.within(limit).cover(n)) <= limit


@pytest.mark.parametrize("expected", [32, 50, 100, 333, 1024, 4096, 20_000])
@pytest.mark.parametrize("parts", [0.5, 1.0, 3.7])
def test_few_rows_are_padding_and_there_are_few_sizes(expected, parts):
    padding = choose_padding(expected, expected**0.5, limit=int(expected / parts))
    lots = np.random.default_rng(0).poisson(expected, 4000)
    covers = [padding.cover(n) for n in lots]
    assert sum(map(sum, covers)) / lots.sum() <= 1.08
    assert len({rows for cover in covers for rows in cover}) <= 40
    few = [padding.with_few_sizes().cover(n) for n in lots]
    assert len({rows for cover in few for rows in cover}) <= 8


def test_lots_of_one_size_have_no_padding():
    assert choose_padding(100, 0.0, limit=30).cover(100) == [25] * 4
    assert choose_padding(32, 0.0, limit=100).cover(32) == [32]
