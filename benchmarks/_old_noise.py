"""The GPU's noise before the grid, for `noise_cost.py`: Philox4x32 and float32 Box-Muller."""

import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above


@triton.jit
def _uniform(word):
    return (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _normal_pair(first, second):
    radius = tl.sqrt(-2.0 * tl.log(_uniform(first)))
    angle = 6.283185307179586 * _uniform(second)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def normals(key, nonce, counter, ROUNDS: tl.constexpr):
    """Draw eight standard normal numbers for each lane."""
    w = tl.randint4x(nonce, counter)
    v = tl.randint4x(nonce, counter + 1073741824)
    z0, z1 = _normal_pair(w[0], w[1])
    z2, z3 = _normal_pair(w[2], w[3])
    z4, z5 = _normal_pair(v[0], v[1])
    z6, z7 = _normal_pair(v[2], v[3])
    return z0, z1, z2, z3, z4, z5, z6, z7


@triton.jit
def released(x, z, grid):
    """Return x + noise, in float32."""
    factor = (grid[0] * grid[2]).to(tl.float32)
    return x * factor + z * (grid[1] * grid[2]).to(tl.float32)
