"""Checks of arguments: what they refuse, and what their messages say."""

import pytest

from tacit._bisection import bisected
from tacit._check import known_key, one_of, whole, within


def test_a_number_outside_its_range_is_refused_with_the_range_and_advice():
    assert within(1, 2, factor=2) == 2.0
    for wrong in (0.5, 2.5, float("nan")):
        with pytest.raises(ValueError, match=r"factor must be between 1 and 2, got .* Use 1\."):
            within(1, 2, advice="Use 1.", factor=wrong)
    with pytest.raises(TypeError, match="factor must be between 1 and 2, got str"):
        within(1, 2, factor="1")


def test_a_whole_number_has_a_largest_value_where_one_is_asked_for():
    assert whole(bands=8, at_most=8) == 8
    with pytest.raises(ValueError, match="bands must be at most 8, got 9"):
        whole(bands=9, at_most=8)
    assert whole(most=3, least=1) == 3  # the name of an argument of some events
    with pytest.raises(ValueError, match="got more"):
        whole(bands=10**5000)


def test_an_unknown_word_is_refused_with_the_known_ones_and_the_closest():
    one_of((True, False, "auto"), compile="auto")
    with pytest.raises(ValueError, match=r"mode must be one of on, off, got 'ofv'. .*'off'\?"):
        one_of(("on", "off"), mode="ofv")
    with pytest.raises(ValueError, match="mode must be one of on, off, got None"):
        one_of(("on", "off"), mode=None)
    with pytest.raises(ValueError, match=r"\[run\] has no 'sed'. Did you mean 'seed'\?"):
        known_key("[run]", "sed", ("seed", "folder"))
    with pytest.raises(ValueError, match=r"\[run\] has no 'x'. It has seed, folder"):
        known_key("[run]", "x", ("seed", "folder"))


def test_bisection_encloses_the_change_within_the_width_that_was_asked_for():
    low, high = bisected(lambda x: x >= 0.3, 0.0, 1.0, absolute=1e-6)
    assert low < 0.3 <= high
    assert high - low <= 1e-6
    low, high = bisected(lambda x: x >= 300.0, 0.0, 1e6, relative=1e-3)
    assert low < 300.0 <= high <= low + 1e-3 * high
