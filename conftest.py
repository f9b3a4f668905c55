"""Which files the doctest run leaves alone: GPU kernels need Triton just to be imported."""

import importlib.util

collect_ignore = []
if importlib.util.find_spec("triton") is None:
    kernels = ("banded_blocks", "conv_norms", "gram", "noise", "update", "weighted_rows")
    collect_ignore = [f"tacit/training/gpu/{name}.py" for name in kernels]
