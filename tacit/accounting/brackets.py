"""The answer of a certified accountant: two ends with the truth between them."""

from typing import NamedTuple


class Bracket(NamedTuple):
    """A certified statement `lower <= truth <= upper`; both ends are proved, neither is a guess.

    >>> Bracket(0.25, 0.75).width
    0.5
    """

    lower: float
    upper: float

    @property
    def width(self) -> float:
        """How much is left open; 0 where both ends are infinite."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower

    @staticmethod
    def of_delta(lower: float, upper: float) -> "Bracket":
        """Both ends held within [0, 1]; an end that is not a number says nothing.

        >>> Bracket.of_delta(float("nan"), float("nan"))
        Bracket(lower=0.0, upper=1.0)
        """
        return Bracket(min(lower, 1.0) if lower > 0 else 0.0, max(upper, 0.0) if upper < 1 else 1.0)

    def meets(self, other: "Bracket") -> bool:
        """Whether two brackets of one number can both be right."""
        return self.lower <= other.upper and other.lower <= self.upper
