"""Integer Gaussian noise on a public grid: the sampler of the CPU, and the error of its law.

A sum x is rounded to whole multiples of a public step g, a power of two; noise is a normal number
n rounded to multiples of g; what is released is the integer x/g + n/g. Rounding commutes with
shifts by the grid, so for an exact normal n this is post-processing of the Gaussian mechanism on
the rounded sum, and whatever the sampler does, the law of the integer noise is one and the same for
all inputs. So the low bits of a release reveal nothing about the sum: the attacks of Mironov 2012
and Haney et al. 2022 compare the numbers of noise values that lead to a given output, and here
these numbers are equal by construction. Everything after the integer (scaling, cast to float32,
optimizer) is post-processing.

The sampler is the ziggurat of Marsaglia & Tsang 2000 with 1,024 layers and 64 random bits a number.
It is exact in real arithmetic, since it is rejection sampling; here is what doubles change.

- A number that is accepted at once (99.7 %) is w x / 2^63, w being the signed word and x <= 4.3 the
  width of the layer that its ten lowest bits choose. The word is rounded to a double, and so is the
  product: possible values are at most 2^-50 apart and moved by at most 2^-50, while one grid step
  is 2^-29 standard deviations or more (`NoiseGrid`). So the number of values in a cell, and with
  it the cell's probability, is right to a factor 1 + 2^-20.
- Widths and heights of the layers are doubles whose areas agree to 2^-36 (a test computes it), and
  a wedge is accepted by a comparison with exp, right to 2^-50 of a height of 2^-11 or more.
- The tail beyond 4.04 uses logarithms of uniform numbers with at least 64 significant bits however
  small they are. So the tail does not end, and no uniform number is 0.

Only additions, multiplications, divisions and roundings occur on the fast path, each of which IEEE
754 defines to the last bit. A record that moves m coordinates by one cell gains at most about
sqrt(2 m) 2^-20 nats beyond the price of the Gaussian mechanism: 1.4e-3 for a million coordinates.

The fast path is written twice: as passes of numpy over a strip (`_propose`, `_release`), and as one
loop over its numbers (`compiled_loop`) for machines with the package llvmlite. Both give the same
bits, so a run may go on where the package is missing. The compiled loop is used only after it gave
the bits of numpy on 4,096 words.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tacit.training.noise.compiled_loop import Loop, compiled_loop

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

_Kinds = tuple[np.dtype[Any], np.dtype[Any]]  # of the numbers that a loop reads and writes
_Loops = dict[_Kinds, Loop]

TILE = 1 << 19  # numbers of one thread's task
_STRIP = 1 << 15  # numbers in one pass of numpy: few enough for the processor's nearest caches
_PATIENCE = 1 << 25  # numbers that numpy releases first: the loop saves as much as compiling takes
_MOST = 2.0**1000  # grid steps of a sum
_COARSEST, _FINEST = 28, 40  # the noise has a standard deviation of 2^28 to 2^41 grid steps
_USUAL_RATIO = 2.0**-10  # of rounding's charge to the sensitivity, at most, for k < 40
_LAYERS = 1024
_START_OF_TAIL = 4.038849846109504  # makes 1,024 layers of equal area; found by bisection
_released = 0  # numbers, by this process


class Source(Protocol):
    """Sequences of independent random 64-bit words, each the same whenever it is asked for."""

    def sequence(self, number: int) -> Callable[[int], Words]:
        """Return a function whose calls give so many words each, in the order of the sequence."""
        ...


class NoiseGrid(NamedTuple):
    """The public grid of a sum.

    `step` is the distance of neighboring values, a power of two. `noise_steps` is the standard
    deviation of the noise in steps, 2^28 or more: 2^k to 2^(k + 1) for k of `make_grids`.
    """

    step: float
    noise_steps: float


def make_grids(
    noise_multiplier: float, scales: Sequence[float], dimension: int, *, bands: int = 1
) -> list[NoiseGrid]:
    """Return a grid for each part of a sum with `dimension` coordinates in all, from its scale.

    Guarantee: one example moves the sum, each part divided by its scale, by at most 1 in L2 norm.
    Rounding moves each of two neighboring sums by at most half a step in each coordinate, so
    afterwards they are at most 1 + sqrt(d) h apart, with d coordinates and h the largest step
    divided by its scale. The noise is `noise_multiplier` times that, so the event stays
    `Gaussian(noise_multiplier)`. With h <= 2^-k noise_multiplier (1 + rho) this needs
    rho >= r (1 + rho) for r = 2^-k noise_multiplier sqrt(d): rho = r / (1 - r). k is 28, or as much
    more, up to 40, as makes r <= 2^-10. A replaced example moves the sum by at most 2, and by less
    than 2 (1 + rho) after rounding.

    With more than one of `bands`, one example moves that many releases, each rounded, and what is
    kept between steps is rounded to 2^-24 noise deviations; doubles add less than 2^-24 to that
    (`tacit.training.noise.banded_noise` has the proof). So r is
    (2^-k sqrt(bands) + 2^-23) noise_multiplier sqrt(d).

    >>> make_grids(1.0, [0.5], 10**6)[0].step == 2.0**-29
    True
    """
    spread = noise_multiplier * math.sqrt(max(1, dimension))
    several = math.sqrt(bands)
    k = min(_FINEST, max(_COARSEST, math.ceil(math.log2(spread * several / _USUAL_RATIO))))
    ratio = spread * (several * 2.0**-k + (2.0**-23 if bands > 1 else 0.0))
    if ratio > 0.5:
        raise ValueError(
            f"noise_multiplier must be below {2.0 ** (_FINEST - 1):.3g} / sqrt(number of "
            f"parameters), got {noise_multiplier:g}: rounding to the grid would move the sum more "
            "than one record does."
        )
    stretch = (1 + ratio / (1 - ratio)) * (1 + 2.0**-50)  # rounding only adds noise
    stds = [noise_multiplier * scale * stretch for scale in scales]
    steps = [math.ldexp(1.0, math.frexp(std)[1] - 1 - k) for std in stds]
    if not all(2.0**-1000 < step < 2.0**900 for step in steps):
        raise ValueError("noise_multiplier times clip_norm is too small or too large a number.")
    return [NoiseGrid(step, std / step) for step, std in zip(steps, stds, strict=True)]


class ComputedSum(Protocol):
    """A flat part of a sum that is computed when it is released, and that notes what was released.

    An array or a `SparseSum` holds its numbers.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, here: slice) -> "ComputedSum": ...

    def in_steps(self, space: Sequence[Floats], /) -> Floats:
        """Return these numbers, in whole steps of the grid.

        `space` are three arrays of their size to compute in, kept as they are until `released`.
        """
        ...

    def released(self, values: Floats, late: Indices) -> None:
        """Take note of released numbers, of which those at `late` are not final."""
        ...

    def released_late(self, values: Floats, late: Indices) -> None:
        """Take note of the numbers at `late`."""
        ...


class SparseSum:
    """Numbers `first` to `first + size` of a table's sum, which is zero except in the given rows.

    Noise is added to all numbers, so a release does not show which rows were given.
    """

    def __init__(self, rows: Indices, values: NDArray[Any], first: int, size: int) -> None:
        self.rows = rows  # ascending, each once
        self.values = values  # (rows, width), float32 or float64
        self.first = first
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, here: slice) -> "SparseSum":
        start, stop, _ = here.indices(self.size)
        return SparseSum(self.rows, self.values, self.first + start, stop - start)

    def dense(self, space: Floats) -> NDArray[Any]:  # Any: the type of the values
        """Return all numbers, in the memory of as many in `space`."""
        found = space.view(self.values.dtype)[: self.size]
        found.fill(0.0)
        width, stop = self.values.shape[1], self.first + self.size
        begin, end = -(-self.first // width), stop // width  # the rows that are within as a whole
        if begin < end:
            given = slice(*self.rows.searchsorted((begin, end)))
            whole = found[begin * width - self.first : end * width - self.first]
            whole.reshape(-1, width)[self.rows[given] - begin] = self.values[given]
        for row in {begin - 1, end}:  # that may be within in part
            start, last = max(self.first, row * width), min(stop, (row + 1) * width)
            at = int(self.rows.searchsorted(row)) if start < last else len(self.rows)
            if at < len(self.rows) and self.rows[at] == row:
                part = self.values[at, start - row * width : last - row * width]
                found[start - self.first : last - self.first] = part
        return found


class SumOnGrid(NamedTuple):
    """A flat part of a sum, its grid, and where it is released to: `out` may be `total` itself."""

    total: NDArray[Any] | SparseSum | ComputedSum  # Any: float32 or float64
    grid: NoiseGrid
    out: NDArray[Any]

    def at(self, here: slice) -> "SumOnGrid":
        """Return the coordinates in `here` only."""
        return SumOnGrid(self.total[here], self.grid, self.out[here])


def add_noise(
    parts: Sequence[SumOnGrid], factor: float, *, source: Source, threads: int = 1
) -> None:
    """Write factor * step * (round(total / step) + integer noise) to `out` of each part.

    Number i of all parts, one after the other, takes its noise from fixed words, so the number of
    threads does not matter.
    """

    tiles = list(_cut(parts, TILE))
    loops = _loops_of(parts)

    def work(tile: int) -> None:
        # Too large a float32 is infinite, whatever the sum was; `in_steps` limits infinite sums.
        with np.errstate(over="ignore", invalid="ignore"):
            _add_to_tile(tiles[tile], factor, source=source, tile=tile, loops=loops)

    if min(threads, len(tiles)) < 2:
        for tile in range(len(tiles)):
            work(tile)
        return
    with ThreadPoolExecutor(min(threads, len(tiles))) as pool:
        list(pool.map(work, range(len(tiles))))


def _cut(parts: Sequence[SumOnGrid], size: int) -> Iterator[list[SumOnGrid]]:
    """Yield the coordinates of all parts, one after the other, `size` at a time."""
    found, room = [], size
    for part in parts:
        start, stop = 0, len(part.total)
        while start < stop:
            end = min(stop, start + room)
            found.append(part.at(slice(start, end)))
            start, room = end, room - (end - start)
            if not room:
                yield found
                found, room = [], size
    if found:
        yield found


def _add_to_tile(
    parts: Sequence[SumOnGrid], factor: float, *, source: Source, tile: int, loops: _Loops
) -> None:
    """Release one tile, with words of two sequences: one for each number, and further ones.

    The few numbers whose first word does not decide are released at the end.
    """
    draw, undecided, their_words = source.sequence(2 * tile), [], []
    # With one noise scale, the layers are scaled in its place: one pass less.
    grids = {part.grid for part in parts}
    scale = next(iter(grids)).noise_steps if len(grids) == 1 else 1.0
    layers = ziggurat()
    unit, inside = layers.unit * scale, layers.inside * scale
    for strip in _cut(parts, _STRIP):
        words, start = draw(sum(len(part.total) for part in strip)), 0
        proposed = None if loops else _propose(words, _SPACE.noise[: len(words)], unit, inside)
        for part in strip:
            here = slice(start, start + len(part.total))
            if proposed is None:
                loop = loops[_kinds(part)]
                found = _release_by(loop, part, words[here], unit, inside, scale, factor)
            else:
                late = proposed
                if len(strip) > 1:
                    late = late[slice(*late.searchsorted((here.start, here.stop)))] - start
                found = late, _release(part, _SPACE.noise[here], late, scale, factor)
            undecided.append((part, *found))
            their_words.append(words[here][found[0]])
            start = here.stop
    noise, start = _finish(np.concatenate(their_words), source.sequence(2 * tile + 1)), 0
    for (total, (step, noise_steps), out), places, steps in undecided:
        steps += np.rint(noise[start : start + len(places)] * noise_steps)
        steps *= step * factor
        out[places] = steps
        if not isinstance(total, np.ndarray | SparseSum):
            total.released_late(steps, places)
        start += len(places)


def _release(part: SumOnGrid, noise: Floats, late: Indices, scale: float, factor: float) -> Floats:
    """Write factor * step * (round(total / step) + round(noise)) to `out`; overwrite `noise`.

    The noise comes in units of its standard deviation over `scale`. The sum of two doubles that are
    integers is the exact integer or, beyond 2^53, the double nearest to it, which is a function of
    the exact integer. The places in `late` have no noise so far: they are set to NaN, and
    round(total / step) of these is returned.
    """
    total, (step, noise_steps), out = part
    noise[late] = -0.0  # to which a number is added without a change, be it 0.0 or -0.0
    if noise_steps != scale:
        np.multiply(noise, noise_steps / scale, out=noise)
    np.rint(noise, out=noise)
    if isinstance(total, SparseSum):
        total = total.dense(_SPACE.bounds)
    if isinstance(total, np.ndarray):
        noise += in_steps(total, step, _SPACE.floats[: len(total)])
    else:
        noise += total.in_steps([array[: len(total)] for array in _SPACE.spare])
    steps = noise[late]
    np.multiply(noise, step * factor, out=noise)
    if not isinstance(total, np.ndarray):
        total.released(noise, late)
    np.copyto(out, noise, casting="same_kind")
    out[late] = math.nan
    return steps


def _release_by(
    loop: Loop,
    part: SumOnGrid,
    words: Words,
    unit: Floats,
    inside: Floats,
    scale: float,
    factor: float,
) -> tuple[Indices, Floats]:
    """Release a part by the compiled loop; return the undecided places and the sums there."""
    (total, (step, noise_steps), out), n = part, len(words)
    if isinstance(total, SparseSum):
        total = total.dense(_SPACE.bounds)
    if isinstance(total, np.ndarray):
        x, per_step, found = total, 1.0 / step, out
    else:
        x, per_step, found = (
            total.in_steps([array[:n] for array in _SPACE.spare]),
            1.0,
            _SPACE.noise[:n],
        )
    numbers = noise_steps / scale, x, per_step, step * factor
    count = loop(words, unit, inside, *numbers, found, _SPACE.late, _SPACE.steps)
    late, steps = _SPACE.late[:count].copy(), _SPACE.steps[:count].copy()
    if not isinstance(total, np.ndarray):
        found[late] = 0.0
        total.released(found, late)
        np.copyto(out, found, casting="same_kind")
        out[late] = math.nan
    return late, steps


def _loops_of(parts: Sequence[SumOnGrid]) -> _Loops:
    """Return the compiled loop for each kind of part; none if numpy is to release all parts."""
    global _released
    _released += sum(len(part.total) for part in parts)
    found: _Loops = {}
    for part in parts:
        # The loop expects memory that is aligned and without gaps.
        is_plain = all(array.flags.carray for array in _read_and_written(part))
        kinds = _kinds(part)
        loop = _compiled(*kinds) if is_plain and _released >= _PATIENCE else None
        if loop is None:
            return {}
        found[kinds] = loop
    return found


def _read_and_written(part: SumOnGrid) -> tuple[NDArray[Any], NDArray[Any]]:  # Any: float32 or 64
    """Return the arrays that the loop reads and writes for a part, or others of their kind."""
    total, _, out = part
    if isinstance(total, np.ndarray):
        return total, out
    if isinstance(total, SparseSum):
        return total.values, out
    return _SPACE.noise, _SPACE.noise


def _kinds(part: SumOnGrid) -> _Kinds:
    read, written = _read_and_written(part)
    return read.dtype, written.dtype


@lru_cache(maxsize=4)
def _compiled(read: np.dtype[Any], written: np.dtype[Any]) -> Loop | None:
    """Return the compiled loop for these types; None without one, or if a bit is not numpy's."""
    loop = compiled_loop(str(read), str(written))
    return loop if loop is not None and _is_as_numpy(loop, read, written) else None


def _is_as_numpy(loop: Loop, read: np.dtype[Any], written: np.dtype[Any]) -> bool:
    """Return True if the loop gives the bits of numpy for some fixed sums and words."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**64, 4096, np.uint64)
    words[:4] = 0, 2**63 - 1, 2**63, 2**64 - 1
    total = (rng.random(4096) - 0.5) * 2.0 ** rng.integers(-80, 80, 4096)
    total[::100], total[1::100], total[2::100], total[3] = math.inf, -math.inf, 0.0, math.nan
    # With steps as fine as doubles are, the last bit of each product shows.
    grid, layers, found = NoiseGrid(2.0**-29, 1.1 * 2.0**50), ziggurat(), []
    for is_loop, scale in itertools.product((False, True), (1.0, grid.noise_steps)):
        part = SumOnGrid(total.astype(read), grid, np.empty(4096, written))
        unit, inside = layers.unit * scale, layers.inside * scale
        with np.errstate(over="ignore", invalid="ignore"):
            if is_loop:
                late, steps = _release_by(loop, part, words, unit, inside, scale, 0.1)
            else:
                noise = np.empty(4096)
                late = _propose(words, noise, unit, inside)
                steps = _release(part, noise, late, scale, 0.1)
        found.append(b"".join(array.tobytes() for array in (np.abs(part.out), late, steps)))
    return found[:2] == found[2:]


def in_steps(total: NDArray[Any], step: float, x: Floats) -> Floats:
    """Set `x` to round(total / step), and return it; division by a power of two is exact.

    An infinite sum, after an overflow, is limited: that never increases a distance.
    """
    np.copyto(x, total)  # casts apart from products: numpy would buffer them
    np.multiply(x, 1.0 / step, out=x)
    return rounded(x)


def rounded(x: Floats) -> Floats:
    """Round `x` in place to whole numbers, limit infinite ones, and return it."""
    np.rint(x, out=x)
    if not (x.max(initial=0.0) <= _MOST and x.min(initial=0.0) >= -_MOST):
        np.clip(x, -_MOST, _MOST, out=x)
    return x


class _Space(threading.local):
    """Arrays that a thread uses again: fresh memory pages would cost as much as the draw."""

    def __init__(self, size: int) -> None:
        self.noise = np.empty(size)
        self.floats = np.empty(size)
        self.bounds = np.empty(size)
        self.layers = np.empty(size, np.int64)
        self.flags = np.empty(size, np.bool_)
        self.late, self.steps = np.empty(size, np.int64), np.empty(size)
        self.spare = [self.floats, self.bounds, self.layers.view(np.float64)]  # after `_propose`


_SPACE = _Space(_STRIP)


class _Ziggurat(NamedTuple):
    """Layer i has the points |z| < width[i] at heights from floor[i] to floor[i] + height[i].

    Points with |z| < inside[i] are below the curve exp(-z^2 / 2) for certain. Layer 0 holds the
    tail: a point of it beyond `inside` is replaced by one of the tail. `unit` is width / 2^63.
    """

    unit: Floats
    inside: Floats
    floor: Floats
    height: Floats


@lru_cache(maxsize=1)
def ziggurat() -> _Ziggurat:
    """Return the layers: `_LAYERS` of equal area under the curve exp(-z^2 / 2)."""
    floor = math.exp(-_START_OF_TAIL * _START_OF_TAIL / 2)
    tail = math.sqrt(math.pi / 2) * math.erfc(_START_OF_TAIL / math.sqrt(2))
    area = _START_OF_TAIL * floor + tail
    width, floors = [area / floor, _START_OF_TAIL], [0.0, floor]
    while len(width) < _LAYERS:
        floors.append(floors[-1] + area / width[-1])
        width.append(math.sqrt(-2 * math.log(floors[-1])))
    height = np.subtract([*floors[1:], 1.0], floors)
    unit, inside = np.multiply(width, 2.0**-63), np.array([*width[1:], 0.0])
    return _Ziggurat(unit, inside, np.array(floors), height)


def _propose(words: Words, points: Floats, unit: Floats, inside: Floats) -> Indices:
    """Set `points` to a point of a random layer for each word; return which are undecided.

    The signed word gives the place in the layer, its ten lowest bits the layer. They shift the
    place by less than 2^-53 of the layer's width, which is the rounding of the word to a double.
    """
    signed, n = words.view(np.int64), len(words)
    space = _SPACE if n <= _STRIP else _Space(n)
    layer, bound = space.layers[:n], space.bounds[:n]
    np.bitwise_and(signed, _LAYERS - 1, out=layer)
    np.copyto(points, signed)
    unit.take(layer, out=bound, mode="wrap")
    np.multiply(points, bound, out=points)
    inside.take(layer, out=bound, mode="wrap")
    size = np.abs(points, out=layer.view(np.float64))  # whose memory is free
    return np.greater_equal(size, bound, out=space.flags[:n]).nonzero()[0]


def _finish(words: Words, draw: Callable[[int], Words]) -> Floats:
    """Return normal numbers for words whose points are undecided: accept them, or draw again."""
    found, late = np.empty(len(words)), np.arange(len(words))
    while True:
        points, is_done = np.empty(len(words)), np.ones(len(words), np.bool_)
        undecided = _propose(words, points, *ziggurat()[:2])
        is_done[undecided] = _accept(points, words, undecided, draw)
        found[late] = points
        late = late[~is_done]
        if not late.size:
            return found
        words = draw(len(late))


def _accept(
    points: Floats, words: Words, undecided: Indices, draw: Callable[[int], Words]
) -> NDArray[np.bool_]:
    """Return which undecided points are accepted, after replacing those of the tail.

    A point of a wedge is at a uniform height of its layer, and accepted below the curve.
    """
    layers, z = ziggurat(), points[undecided]
    layer = (words[undecided] & np.uint64(_LAYERS - 1)).astype(np.int64)
    share = (draw(len(z)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    is_below = layers.floor[layer] + share * layers.height[layer] < np.exp(-z * z / 2)
    beyond = (layer == 0).nonzero()[0]
    points[undecided[beyond]] = np.copysign(_tail(len(beyond), draw), z[beyond])
    return is_below | (layer == 0)


def _tail(count: int, draw: Callable[[int], Words]) -> Floats:
    """Return normal numbers beyond the start of the tail (Marsaglia 1964, doi:10.2307/1266101)."""
    found, late = np.empty(count), np.arange(count)
    while late.size:
        x = _exponential(late.size, draw) / _START_OF_TAIL
        found[late] = _START_OF_TAIL + x
        late = late[2 * _exponential(late.size, draw) <= x * x]
    return found


def _exponential(count: int, draw: Callable[[int], Words]) -> Floats:
    """Return -ln(u) for uniform u in (0, 1], each with more bits than its leading zeros plus 32.

    A u below 2^-32 gets further words until there are 64 bits after the leading zeros.
    """
    words = draw(count)
    found = -np.log((words.astype(np.float64) + 0.5) * 2.0**-64)
    for i in np.flatnonzero(words < np.uint64(1 << 32)).tolist():
        whole, bits = int(words[i]), 64
        while whole < 2**63:
            whole, bits = whole << 64 | int(draw(1)[0]), bits + 64
        found[i] = bits * math.log(2) - math.log(whole)
    return found
