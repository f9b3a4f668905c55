"""Which files the doctest run leaves alone: GPU kernels need Triton just to be imported."""

import importlib.util

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["tacit/training/kernels/[!_]*.py"]
