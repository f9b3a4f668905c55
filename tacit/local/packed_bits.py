"""Rows of bits packed into bytes: how reports with one bit per option are stored and counted.

A row of k bits takes ceil(k / 64) * 8 bytes, so that rows can be read as words of 64 bits.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.local.coins import whole_numbers

_ROWS = 255
"""Rows that are added at a time: the largest count that one byte can hold."""
_WORDS = 512
"""Words in which additions are made, a compromise between long loops and a small cache."""
_LOWEST = np.uint64(0x0101010101010101)
"""The lowest bit of each byte of a word."""


def row_bytes(n_bits: int) -> int:
    """Return the number of bytes of one packed row of `n_bits` bits."""
    return -(-n_bits // 64) * 8


def pack(bits: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return rows of bits, shape (n, k), as packed bytes, shape (n, row_bytes(k))."""
    packed = np.packbits(bits, axis=1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, row_bytes(bits.shape[1]) - packed.shape[1])))


def checked(rows: ArrayLike, n_bits: int) -> NDArray[np.uint8]:
    """Return received reports as an array of packed rows; raise if they do not have that form."""
    packed = np.asarray(rows)
    if packed.dtype != np.uint8:  # whole numbers, as JSON has them
        packed = whole_numbers(packed, 256, "reports").astype(np.uint8)
    if packed.ndim != 2 or packed.shape[1] != row_bytes(n_bits):
        raise ValueError(f"reports must be rows of {row_bytes(n_bits)} bytes, one row per person.")
    return packed


def unpack(packed: NDArray[np.uint8], n_bits: int) -> NDArray[np.bool_]:
    """Return packed rows as an array of bool, shape (n, n_bits)."""
    return np.unpackbits(packed, axis=-1, count=n_bits, bitorder="little").astype(bool)


def column_counts(packed: NDArray[np.uint8], n_bits: int) -> NDArray[np.int64]:
    """Count for each bit position the rows in which the bit is set.

    Bit b of every byte is moved to the lowest place, and 255 such rows are added with all bytes
    of a word at once: no byte can overflow. This reads a million rows of 1,000 bits in a
    fraction of a second.

    >>> column_counts(pack(np.array([[True, False, True], [True, False, False]])), 3).tolist()
    [2, 0, 1]
    """
    width = packed.shape[1] // 8
    words = np.ascontiguousarray(packed).view(np.uint64).reshape(len(packed), width)
    total = np.zeros((packed.shape[1], 8), dtype=np.int64)
    side = max(1, _WORDS // width)  # rows that are laid side by side, so that additions are long
    for start in range(0, len(words), side * _ROWS):
        rows = words[start : start + side * _ROWS]
        if missing := -len(rows) % side:
            rows = np.pad(rows, ((0, missing), (0, 0)))
        rows = rows.reshape(-1, side * width)  # at most 255 rows
        for bit in range(8):
            sums = ((rows >> np.uint64(bit)) & _LOWEST).sum(axis=0)
            lanes = sums.view(np.uint8).reshape(side, -1)
            total[:, bit] += lanes.sum(axis=0, dtype=np.int64)
    return total.reshape(-1)[:n_bits]
