"""Banded strategies against those of JAX Privacy: error of running sums, and time to optimize.

    pip install jax-privacy    (in an environment of its own)
    python benchmarks/banded_strategies.py

Both optimize the first column of a banded Toeplitz matrix for the root mean square error of all
running sums at unit sensitivity. JAX Privacy runs in float64 on the CPU; its first call for a size
compiles, so the time of a second call is shown too. The error of both is computed by
`tacit.mechanisms.running_error`. CPU seconds, median of three for tacit.
"""

import time
from collections.abc import Callable

import numpy as np
from _results import table, write

from tacit.mechanisms import optimal_bands, running_error
from tacit.mechanisms.banded import _optimal

SIZES = ((256, 16), (512, 32), (1024, 16), (1024, 64), (2048, 16), (2048, 64))


def main() -> None:
    """Optimize every size with both libraries and write the table."""
    import jax

    jax.config.update("jax_enable_x64", True)
    from jax_privacy.matrix_factorization import toeplitz

    rows = []
    for steps, bands in SIZES:
        times = []
        for _ in range(3):
            _optimal.cache_clear()
            seconds, column = timed(lambda n=steps, b=bands: optimal_bands(n, b))
            times.append(seconds)
        own = sorted(times)[1]

        def optimize(n: int = steps, b: int = bands) -> np.ndarray:
            return np.asarray(toeplitz.optimize_banded_toeplitz(n, b))

        (first, _), (second, theirs) = timed(optimize), timed(optimize)
        errors = [running_error(c / np.linalg.norm(c), steps) for c in (column, theirs)]
        rows.append(
            (
                steps, bands, f"{errors[0]:.8f}", f"{errors[1]:.8f}", f"{own:.3f}",
                f"{first:.2f}", f"{second:.2f}", f"{first / own:.0f}", f"{second / own:.0f}",
            )
        )  # fmt: skip
        print(*rows[-1], flush=True)
    header = (
        "steps", "bands", "error, tacit", "error, JAX Privacy", "s, tacit", "s, JAX Privacy, first",
        "s, again", "times faster", "times faster than again",
    )  # fmt: skip
    text = (__doc__ or "").split("\n\n", 2)[2].strip()
    write("banded_strategies", "Banded strategies", ("jax", "jax-privacy", "numpy", "scipy"), text,
          table(header, rows))  # fmt: skip


def timed(call: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    """Return the CPU seconds of a call, and its result."""
    start = time.process_time()
    found = call()
    return time.process_time() - start, found


if __name__ == "__main__":
    main()
