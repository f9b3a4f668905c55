"""The sizes to which microbatches are padded, so that few recorded graphs serve every lot.

A Poisson lot of 32 expected records has 26 to 38 in two of three steps. The compiled computation
takes any number of rows, but each number is recorded as a CUDA graph of its own, which takes a
moment. Padded to even numbers, a record drawn costs the work of 1.02 rows, and some 17 recordings
serve all lots but one in 400.
"""

import math
from dataclasses import dataclass, replace

_WASTE = 0.025  # rows of padding for each record drawn, about
_LEAST = 2  # rows; the compiler would treat a single row apart


@dataclass(frozen=True)
class Padding:
    """How lots are cut into microbatches: balanced parts, each padded to a multiple of some rows.

    Attributes
    ----------
    multiple
        Rows of a microbatch are a multiple of this number.
    limit
        Most rows of a microbatch, at least `multiple`.
    spread
        A multiple that gives few sizes in all, for programs that are compiled anew for each.

    Examples
    --------
    >>> Padding(multiple=4, limit=64).cover(33)
    [36]
    >>> Padding(multiple=4, limit=32).cover(33)
    [20, 16]
    """

    multiple: int
    limit: int
    spread: int = 1

    def cover(self, n: int) -> list[int]:
        """Return the sizes of the microbatches for `n` records, each record in one of them."""
        room = self.limit // self.multiple * self.multiple
        parts = -(-n // room)
        whole, rest = divmod(n, parts) if parts else (0, 0)
        return [self._padded(whole + (part < rest)) for part in range(parts)]

    def within(self, limit: int) -> "Padding":
        """Return the padding with microbatches of at most `limit` rows."""
        limit = min(limit, self.limit)
        return replace(self, limit=limit, multiple=min(self.multiple, limit))

    def with_few_sizes(self) -> "Padding":
        """Return a padding that wastes more rows and gives fewer sizes."""
        return replace(self, multiple=min(self.limit, max(self.multiple, self.spread)))

    def _padded(self, rows: int) -> int:
        padded = self.multiple * math.ceil(rows / self.multiple)
        return max(padded, min(_LEAST, self.limit))


def choose_padding(expected: float, deviation: float, *, limit: int) -> Padding:
    """Return the padding for lots of about `expected` records, in parts of at most `limit` rows.

    `deviation` is the standard deviation of a lot's size, 0 if all have the same: then nothing is
    padded. Only public facts enter.
    """
    if deviation == 0:
        return Padding(multiple=1, limit=limit)
    part = expected / math.ceil(max(1.0, expected) / limit)
    multiple = 2 ** int(math.log2(1 + 2 * _WASTE * part))
    spread = math.ceil(2 * deviation * part / expected)
    return Padding(multiple=min(multiple, limit), limit=limit, spread=min(spread, limit))
