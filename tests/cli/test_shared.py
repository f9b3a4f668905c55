"""Numbers are printed rounded to the safe side."""

import pytest

from tacit.cli._shared import round_down, round_up


@pytest.mark.parametrize("value", [0.94686683, 1e-7 / 3, 123456.789, 2 / 3 * 1e9, 1e-300, 2.0])
def test_printed_bounds_enclose_the_value(value):
    for digits in (4, 6, 8):
        assert float(round_down(value, digits)) <= value <= float(round_up(value, digits))
        assert float(round_up(value, digits)) <= value * (1 + 1.1 * 10 ** (1 - digits))
