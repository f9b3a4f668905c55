"""Correlated noise for training: noise that partly cancels over time (a banded matrix mechanism).

A run releases C g + z instead of g + z. The sums of its steps are g, z is independent Gaussian
noise, and C is lower triangular with the column c = (c_0, ..., c_{b-1}) of norm 1 from its diagonal
down. The gradients that the optimizer gets are recovered from the releases: u = C^-1 (C g + z).
Their running sums carry less noise than those of DP-SGD at the same price, if there are many steps
and few epochs. b = 1 is DP-SGD.

**Price.** With b bands, step t draws from group t mod b of the records, at b times the rate. So the
columns of C that one record touches do not overlap, and each turn of its group is one Gaussian
release on a Poisson sample: ceil(steps / b) of them (Choquette-Choo et al. 2023, arXiv:2306.08153).
More bands cancel more noise and amplify less by sampling. What counts is the product of noise and
error, which is computed for each b from public facts alone before the run.

**On the grid.** With u_s known for s < t, the release of step t can be shifted by a public number:

    y_t = c_0 g_t + sum_{k=1}^{b-1} c_k e_{t-k} + z_t,    e_s = g_s - u_s,    u_t = y_t / c_0.

That is the step of DP-SGD with another sum: y_t is released on the public grid of `grid_noise`, and
u_t is computed from y_t alone. Only the residuals e_s, which are minus the noise of earlier steps,
are kept. They are private: with them anyone could subtract the noise. They are in memory alone, as
the key is.

**Rounding.** Take two data sets that differ by one record, and the same releases up to a point, so
the same u. The record moves g_s by v, of norm at most 1 in units of the scale, whenever it takes
part. Residuals are limited to 2^31 steps of 2^-24 noise deviations or less, which never increases a
distance, and a GPU rounds them to whole steps; so e_s moves by v and by at most one step in each of
d coordinates, and y_{s+k} by c_k times that. Each of b sums is then rounded to the grid, and sums
of b terms in doubles err by less than 2^-31 deviations for b <= 1,024. By the triangle inequality
the record moves y by at most 1 + sqrt(d) (step of residuals + sqrt(b) (step of the grid + 2^-30
deviations)), and the noise is larger by that factor (`make_grids`). How v is chosen may depend on
all earlier releases: the total of squares that one record may move is what a Gaussian release can
bear (Smith & Thakurta 2022, arXiv:2210.17520).

**Restarts.** Dropping the residuals of steps before some step cuts columns of C, which moves no sum
more than before. So noise may be started anew at public times (`Banded.restart`). A process that
resumes a run keeps no residuals: it begins a mechanism of its own (docs/guarantees.md).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit import sampling
from tacit._check import in_closed_unit, whole
from tacit.accounting import calibrate
from tacit.events import Event, Gaussian, Relation, Repeated
from tacit.events import Sequence as EventSequence
from tacit.ledger import restart_reserve
from tacit.mechanisms import MOST_BANDS, optimal_bands, running_error, step_deviations
from tacit.training.grid_noise import NoiseGrid, SumOnGrid, rounded
from tacit.training.key import Key
from tacit.training.noise import NoisyMean

if TYPE_CHECKING:
    from tacit.training.gpu.noise import Blocks

Lots = int | sampling.FixedOrder | sampling.Stream
"""Expected size of a lot, or the order of records."""
_RESIDUAL = 24  # residuals are kept in steps of 2^-24 noise deviations, rounded to a power of two
_LIMIT = 2.0**31 - 1  # of these steps
_FORGOTTEN = 4096  # entries of 1 / c, later ones being far smaller: they fall like j^-3/2
_UNKNOWN = -1  # in place of a step: the noise starts anew at the next one
_CHUNK = 1 << 14  # coordinates mixed at a time: few enough for the processor's caches
_AHEAD = 4  # steps whose older residuals are mixed in one pass over the memory


class Bands(NamedTuple):
    """A number of bands, the noise multiplier at a given price, and the noise of running sums.

    `noise` is the root mean square noise of all running sums, in units of the clip norm.
    """

    bands: int
    noise_multiplier: float
    noise: float


class _Strategy(NamedTuple):
    """The sampler and the strategy of a run."""

    sampler: "sampling.Poisson | sampling.CyclicPoisson | sampling.FixedOrder | sampling.Stream"
    column: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Banded:
    """Noise that partly cancels over time, for `make_private(..., noise=Banded())`.

    Lots are drawn by `sampling.CyclicPoisson`, or by a `FixedOrder` or `Stream` that is given as
    `batch_size`. `Noise(correlated=Banded())` takes further settings of noise.

    Parameters
    ----------
    bands
        Number of steps over which noise is correlated, at most all. "auto" takes the power of two
        with the least noise of running sums at the given epsilon. If that is 1, the run is DP-SGD,
        bit for bit.
    average
        The weights of the last `average` steps, as a share of all, are averaged, and the model has
        the mean when the run ends: noise that cancels over time is small in sums and large in each
        step, so the last weights alone gain nothing. 0 leaves the last weights.
    most_bands, memory
        Limits of "auto". Residuals take 8 bytes for each parameter and band but one, 4 on a GPU;
        `memory` is the most bytes that they may take. A CPU takes up to 32 bytes for each parameter
        besides, for sums of residuals.
    restart
        Start the noise anew after every so many steps. With a `FixedOrder` of so many steps this is
        DP-FTRL with restarts (Kairouz et al. 2021, arXiv:2103.00039).
    """

    bands: int | Literal["auto"] = "auto"
    average: float = 0.25
    most_bands: int = 256
    memory: int = 2**32
    restart: int | None = None

    def __post_init__(self) -> None:
        if self.bands != "auto":
            whole(bands=self.bands, least=1, at_most=MOST_BANDS)
        in_closed_unit(average=self.average)
        whole(most_bands=self.most_bands, least=1, at_most=MOST_BANDS)
        whole(memory=self.memory)
        if self.restart is not None:
            whole(restart=self.restart, least=1)

    def limited_by_memory(self, parameters: int) -> "Banded":
        """Return these settings with `most_bands` limited to what `memory` allows."""
        return replace(self, most_bands=min(self.most_bands, 1 + self.memory // (8 * parameters)))

    def chosen(
        self,
        *,
        batch_size: object,
        n_records: int,
        steps: int,
        epsilon: float | None,
        delta: float | None,
        also: tuple[Event, ...],
        relation: Relation,
    ) -> _Strategy:
        """Return sampler and strategy of a run; the arguments are those of `make_plan`."""
        if not isinstance(batch_size, int | sampling.FixedOrder | sampling.Stream):
            raise ValueError(
                "batch_size must be a whole number, FixedOrder or Stream with noise=Banded(...), "
                f"got {type(batch_size).__name__}: the price of correlated noise is proved for "
                "records that take turns."
            )
        setting = {"batch_size": batch_size, "n_records": n_records, "steps": steps}
        bands = self.bands
        if bands == "auto":
            if epsilon is None or delta is None:
                raise ValueError(
                    "bands='auto' needs epsilon and delta: numbers of bands are compared at equal "
                    "price. Give the number of bands with noise_multiplier."
                )
            budget = {"epsilon": epsilon, "delta": delta, "relation": relation}
            options = {"also": also, "most": self.most_bands}
            bands = price_bands("auto", **setting, **budget, **options).bands
        if self.restart is not None and isinstance(batch_size, int):
            raise ValueError("restart is for a FixedOrder or Stream: give one as batch_size.")
        bands = min(bands, steps)
        column = tuple(optimal_bands(steps, bands).tolist())
        return _Strategy(_sampler(batch_size, bands, n_records), column)


def _sampler(
    batch_size: Lots, bands: int, n_records: int
) -> sampling.Poisson | sampling.CyclicPoisson | sampling.FixedOrder | sampling.Stream:
    """Return the sampler for a number of bands: the given one, or one with lots of `batch_size`."""
    if not isinstance(batch_size, int):
        return batch_size
    if bands == 1:
        return sampling.Poisson(batch_size / n_records)
    return sampling.CyclicPoisson(min(1.0, bands * batch_size / n_records), bands)


def price_bands(
    bands: int | Literal["auto"],
    *,
    batch_size: Lots,
    n_records: int,
    steps: int,
    epsilon: float,
    delta: float,
    most: int = 256,
    also: tuple[Event, ...] = (),
    relation: Relation = Relation.ADD_REMOVE,
    is_kept: bool = False,
) -> Bands:
    """Return the least noise of `bands` bands that costs at most `epsilon` at `delta`.

    "auto" takes the number, at most `most`, with the least noise of running sums. Lots are drawn by
    `sampling.CyclicPoisson`, unless `batch_size` is a fixed order. `also` are events of other
    releases that the budget has to cover. With `is_kept`, a checkpoint is kept, for which steps are
    reserved.
    """
    price = partial(
        _price,
        batch_size=batch_size,
        n_records=n_records,
        steps=steps,
        budget={"epsilon": epsilon, "delta": delta, "relation": relation},
        also=also,
        is_kept=is_kept,
    )
    if bands != "auto":
        return price(bands)
    candidates = _candidates(batch_size, n_records, min(whole(most=most, least=1), steps))
    return min(map(price, candidates), key=lambda found: found.noise)


def _candidates(batch_size: Lots, n_records: int, largest: int) -> list[int]:
    """Return the numbers of bands to compare: powers of two, at most `largest`.

    Bands that would need more records than there are (bands * batch_size > n_records) are left out.
    In a fixed order, the number of steps between two turns of a record is tried too.
    """
    turns = 1
    if isinstance(batch_size, int):
        largest = min(largest, max(1, n_records // batch_size))
    else:
        is_order = isinstance(batch_size, sampling.FixedOrder)
        turns = batch_size.steps if is_order else batch_size.separation
    return sorted({min(largest, turns), *(2**k for k in range(largest.bit_length()))})


def _price(
    bands: int,
    *,
    batch_size: Lots,
    n_records: int,
    steps: int,
    budget: dict[str, Any],  # Any: epsilon, delta and relation
    also: tuple[Event, ...],
    is_kept: bool,
) -> Bands:
    """Return the least noise of `bands` bands that costs at most `budget`."""
    column = optimal_bands(steps, bands)
    drawn = _sampler(batch_size, bands, n_records)
    piece = bands if isinstance(batch_size, int) else steps
    paid = steps + (restart_reserve(steps, piece) if is_kept else 0)

    def event(noise_multiplier: float) -> Event:
        if isinstance(drawn, sampling.Poisson):
            run: Event = Repeated(drawn.amplify(Gaussian(noise_multiplier)), paid)
        else:
            run = drawn.event(noise_multiplier, paid, tuple(column.tolist()))
        return EventSequence((*also, run)) if also else run

    multiplier = calibrate(event, **budget)
    noise = multiplier * running_error(column, steps)
    if isinstance(batch_size, int):
        # Sums are divided by the expected lot, which is n / b where b lots of the batch size need
        # more records than there are.
        noise *= batch_size / min(batch_size, n_records / bands)
    return Bands(bands, multiplier, noise)


class MixedSum:
    """c_0 g_t + sum_k c_k e_{t-k} for some coordinates, whose release leaves the residual e_t.

    Residuals are in steps of the grid. `older` is the part of residuals that was mixed before, and
    `recent` are further residuals with their weights. `residual` is where e_t is written to.
    Private.
    """

    def __init__(
        self,
        total: NDArray[Any],  # Any: float32 or float64
        older: NDArray[np.float64],
        recent: Sequence[tuple[NDArray[np.float64], float]],
        residual: NDArray[np.float64],
        options: "_Mixing",
    ) -> None:
        self._total, self._older, self._recent = total, older, recent
        self._residual, self._options = residual, options
        self._sums = np.empty(0)  # in steps, from `in_steps` on; later those at late places

    def __len__(self) -> int:
        return len(self._total)

    def __getitem__(self, here: slice) -> "MixedSum":
        recent = [(row[here], weight) for row, weight in self._recent]
        options = self._residual[here], self._options
        return MixedSum(self._total[here], self._older[here], recent, *options)

    def in_steps(self, space: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return these numbers, in whole steps of the grid."""
        x, term, self._sums = space
        np.copyto(self._sums, self._total)  # which the release may overwrite
        np.multiply(self._sums, 1.0 / self._options.step, out=self._sums)
        np.multiply(self._sums, self._options.weight, out=x)
        x += self._older
        for row, weight in self._recent:
            x += np.multiply(row, weight, out=term)
        return rounded(x)

    def released(self, values: NDArray[np.float64], late: NDArray[np.int64]) -> None:
        """Keep the residuals: the sums less the gradients that were released for them."""
        self._keep(values, self._sums, self._residual)
        self._sums = self._sums[late]

    def released_late(self, values: NDArray[np.float64], late: NDArray[np.int64]) -> None:
        """Keep the residuals at `late`."""
        found = np.empty(len(late))
        self._keep(values, self._sums, found)
        self._residual[late] = found

    def _keep(
        self, values: NDArray[np.float64], sums: NDArray[np.float64], found: NDArray[np.float64]
    ) -> None:
        _, step, batch, limit = self._options
        np.multiply(values, -batch / step, out=found)
        found += sums
        if not (found.min(initial=0.0) >= -limit and found.max(initial=0.0) <= limit):
            np.clip(np.nan_to_num(found, nan=0.0), -limit, limit, out=found)


class _Mixing(NamedTuple):
    """Weight of the newest sum, step of the grid, expected batch, largest residual in steps."""

    weight: float
    step: float
    batch: float
    limit: float


class BandedNoise(NoisyMean):
    """Releases of a run whose noise is correlated over time; see the module.

    Guarantee: all calls together are `events.BandedGaussian(noise_multiplier, column, ...)`, if
    records take part as that event says, and scales and noise multiplier are the same in all calls.
    """

    def __init__(
        self,
        key: Key,
        *,
        expected_batch: float,
        column: Sequence[float],
        restart: int | None = None,
        secure: bool = False,
    ) -> None:
        super().__init__(key, expected_batch=expected_batch, column=column, secure=secure)
        self._restart = restart
        self._begin = 0  # there are no residuals of earlier steps
        self._next = 0  # the step after the newest residual
        self._rows = len(column) - 1
        self._residuals: Tensor | None = None  # (rows, parameters): that of step s in s mod rows
        self._space: Tensor | None = None  # (ahead, parameters): the past of step t in t mod ahead
        self._ready = range(0)  # steps whose residuals from before their block are in _space
        self._growth = step_deviations(self._column, _FORGOTTEN)

    def deviation(self, step: int) -> float:
        """Return the noise's standard deviation on a step's gradient, in units of independent z."""
        since = step - self._begin if self._restart is None else step % self._restart
        return float(self._growth[min(since, _FORGOTTEN - 1)])

    def start_anew(self, step: int) -> None:
        """Drop the residuals of steps before `step`: the columns of the strategy are cut there."""
        self._begin, self._ready = step, range(0)
        if self._residuals is not None:
            self._residuals.zero_()

    def state(self) -> dict[str, object]:
        """Return what is kept between steps, for a replay. Private, like the key."""
        kept = None if self._residuals is None else self._residuals.clone()
        return {"begin": self._begin, "next": self._next, "residuals": kept}

    def load_state(self, state: dict[str, Any]) -> None:  # Any: written by `state`
        """Continue a replay from a `state()`."""
        self._begin, self._next = state["begin"], state["next"]
        self._residuals, self._ready = state["residuals"], range(0)
        self._blocks.clear()  # kernels hold the address of the residuals

    def _release_on_host(
        self,
        sums: Sequence[Tensor],
        scales: Sequence[float],
        step: int,
        noise_multiplier: float,
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> list[Tensor]:
        """Return the gradient recovered from the release of each of `sums`; keep the residuals."""
        sums = [total.to_dense() for total in sums]
        self._begin_step(step)
        sizes = [total.numel() for total in sums]
        kept = self._kept(sum(sizes), sums[0].device)
        if kept.dtype == torch.float64:
            means = super()._release_on_host(sums, scales, step, noise_multiplier, dtypes)
        else:  # a GPU without a kernel for these sums: its residuals are taken to the CPU and back
            grids = self._grids(noise_multiplier, scales, sum(sizes))
            ratios = [residual_step(grid) / grid.step for grid in grids]
            units = torch.tensor(ratios, dtype=torch.float64)
            units = units.repeat_interleave(torch.tensor(sizes))
            self._residuals, self._ready = kept.cpu() * units, range(0)
            try:
                means = super()._release_on_host(sums, scales, step, noise_multiplier, dtypes)
                row = step % self._rows
                kept[row] = (self._residuals[row] / units).to(kept)  # rounded toward zero
            finally:
                self._residuals, self._ready = kept, range(0)
        self._next = step + 1
        return means

    def in_place(
        self, sums: Sequence[Tensor], scales: Sequence[float], *, step: int, noise_multiplier: float
    ) -> "Blocks | None":
        """Return a GPU kernel for this step, to be launched once, or None; see the base class.

        Until `launched` is called, its residual counts as missing: a launch may fail.
        """
        blocks = super().in_place(sums, scales, step=step, noise_multiplier=noise_multiplier)
        if blocks is not None:
            self._begin_step(step)
            self._next = _UNKNOWN
            blocks.set_step(step)  # type: ignore[attr-defined]  # `_block_options` makes BandedBlocks
        return blocks

    def launched(self, step: int) -> None:
        """Count the residual of `step` as kept, because its kernel was launched."""
        self._next = step + 1

    def _block_options(
        self, sums: Sequence[Tensor], grids: Sequence[NoiseGrid]
    ) -> dict[str, Any]:  # Any: those of `BandedBlocks`
        size = sum(total.numel() for total in sums)
        return {
            "column": self._column.tolist(),
            "units": [residual_step(grid) for grid in grids],
            "expected_batch": self._expected_batch,
            "residuals": self._kept(size, sums[0].device),
        }

    def _begin_step(self, step: int) -> None:
        """Start the noise anew where that is asked for, or where a residual is missing.

        One is missing if a checkpoint was made, or the process interrupted, amid a release.
        """
        if step != self._next or (self._restart is not None and step % self._restart == 0):
            self.start_anew(step)

    def _with_past(self, parts: Sequence[SumOnGrid], step: int) -> Sequence[SumOnGrid]:
        """Return the parts of a sum with the residuals of earlier steps, and keep the new ones."""
        kept = self._residuals
        assert kept is not None
        older, recent = self._past(kept, step)
        self._ready = range(step + 1, self._ready.stop)
        rows, start, found = kept.numpy(), 0, []
        for total, grid, out in parts:
            assert isinstance(total, np.ndarray)  # `_release_on_host` made sparse sums dense
            here = slice(start, start + len(total))
            near = [(rows[row, here], weight) for row, weight in recent]
            residual = rows[step % self._rows, here]
            limit = _LIMIT * residual_step(grid) / grid.step
            options = _Mixing(float(self._column[0]), grid.step, self._expected_batch, limit)
            mixed = MixedSum(total, older.numpy()[here], near, residual, options)
            found.append(SumOnGrid(mixed, grid, out))
            start = here.stop
        return found

    def _past(self, kept: Tensor, step: int) -> tuple[Tensor, list[tuple[int, float]]]:
        """Return one part of sum_k c_k e_{t-k}, and the rows of the other part with their weights.

        Residuals fill many times the caches. So a CPU reads them once for a block of `_AHEAD`
        steps: its first step mixes the residuals of steps before the block for all steps of the
        block. To these each step adds those from its own block. The order of additions depends on
        the step alone, so a replay repeats them bit for bit.
        """
        ahead = 1 if kept.is_cuda else min(_AHEAD, self._rows)
        block, shape = step - step % ahead, (ahead, kept.shape[1])
        if self._space is None or (self._space.shape, self._space.device) != (shape, kept.device):
            # Used again in every step: fresh pages of memory cost as much as a pass.
            self._space = torch.empty(shape, dtype=torch.float64, device=kept.device)
            self._ready = range(0)
        if step not in self._ready:
            weights = torch.from_numpy(self._weights(step, block, ahead)).to(kept.device)
            for there in _slices(kept.shape[1], 256 * _CHUNK if kept.is_cuda else _CHUNK):
                torch.mm(weights, kept[:, there].double(), out=self._space[:, there])
            self._ready = range(step, block + ahead)
        recent = [(s % self._rows, float(self._column[step - s])) for s in range(block, step)]
        return self._space[step % ahead], recent

    def _weights(self, step: int, block: int, ahead: int) -> NDArray[np.float64]:
        """Return the weight of each row of residuals in the past of each of `ahead` steps.

        The first of them is `block`. Residuals from then on have weight 0: the rows hold those of
        the steps just before `step`, which may be within the block.
        """
        steps = step - 1 - (step - 1 - np.arange(self._rows)) % self._rows  # of each row
        lags = block + np.arange(ahead)[:, None] - steps
        is_meant = (steps < block) & (lags <= self._rows)
        return np.where(is_meant, self._column[np.clip(lags, 0, self._rows)], 0.0)

    def _kept(self, size: int, device: torch.device) -> Tensor:
        """Return the residuals on the device of the sums: on a GPU in whole units.

        A GPU reads half as much memory for int32; a CPU is twice as fast with float64, in steps of
        the grid.
        """
        kind = torch.int32 if device.type == "cuda" else torch.float64
        if self._residuals is None:
            self._residuals = torch.zeros(self._rows, size, dtype=kind, device=device)
        if self._residuals.shape != (self._rows, size) or self._residuals.dtype != kind:
            raise ValueError("the residuals of the replay are of another model or device.")
        self._residuals = self._residuals.to(device)
        return self._residuals


def residual_step(grid: NoiseGrid) -> float:
    """Return the step to which residuals are rounded for a grid: 2^-24 deviations or less."""
    deviation = float(grid.step) * float(grid.noise_steps)
    return math.ldexp(1.0, math.frexp(deviation)[1] - 1 - _RESIDUAL)


def _slices(size: int, at_once: int) -> Iterator[slice]:
    """Yield the coordinates of a vector of `size` numbers, `at_once` at a time."""
    for start in range(0, size, at_once):
        yield slice(start, min(start + at_once, size))
