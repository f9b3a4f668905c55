"""Which way to an example's gradient norm is cheapest, per layer and device.

A layer with T positions, D inputs and P outputs has the per-example gradient sum_t g_t a_t'. Three
exact ways to its norm (a fourth, |a|^2 |g|^2, is free at T = 1):

- gram: sum_ts (a_t . a_s)(g_t . g_s), T^2 (D + P) products, no gradient formed
  (Goodfellow 2015, arXiv:1510.01799; Li et al. 2022, arXiv:2110.05679, section 4);
- keep: form the gradient, D P numbers, and weigh it later in place of the contraction;
- drop: form it, square it, let it go, and contract later.
"""

from typing import Literal, NamedTuple

import torch

Way = Literal["gram", "keep", "drop"]


class Rates(NamedTuple):
    """What a device does in a second on these operations, and how much memory may be kept."""

    products: float  # multiply-adds
    bytes: float
    cached: float  # bytes of a tensor that the cache holds
    cache: float  # how many it holds
    memory: float  # largest kept gradient, as a multiple of the layer's activations T (D + P)


# Orders of magnitude are enough: only ratios between ways matter. GPU: one H200 as measured for
# this project, 4 TB/s and some 2e14 multiply-adds; CPU: two cores with AVX-512, batched small
# products, where the system hands out the memory of large tensors page by page.
RATES = {
    "cpu": Rates(5e10, 8e9, 2e10, 2.0**24, 4.0),
    "cuda": Rates(2e14, 4e12, 4e12, 0.0, 1.0),
}


def cheapest_way(
    positions: int,
    inputs: int,
    outputs: int,
    *,
    examples: int,
    item: int,
    stored: float,
    device: torch.device,
    fused: bool = False,
    copied: int = 0,
) -> Way:
    """The cheapest way for one layer; `stored` is the size of its activations for one example.

    `fused`: the Gram matrices never leave the chip, and only half of each is formed. `copied`: how
    many numbers of one example only the Gram matrices need to have copied out first.
    """
    rates = RATES.get(device.type, RATES["cpu"])
    size = inputs * outputs
    gram = positions**2 * (inputs + outputs) / rates.products
    gram += 4 * positions**2 * 4 / rates.cached + copied * item / rates.bytes
    if fused:
        gram = positions**2 * (inputs + outputs) / 2 / rates.products
    passes = 3 * size * item  # written, squared, weighted
    is_cached = examples * size * item <= rates.cache
    kept = passes / (rates.cached if is_cached else rates.bytes)
    if kept <= gram and size <= rates.memory * stored:
        return "keep"
    dropped = positions * size / rates.products + passes / rates.cached
    return "drop" if dropped < gram else "gram"
