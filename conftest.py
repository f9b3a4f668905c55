"""Which files the doctest run leaves alone: GPU kernels need Triton just to be imported."""

import importlib.util
from pathlib import Path

collect_ignore = []
if importlib.util.find_spec("triton") is None:
    folder = Path(__file__).parent / "tacit/training/gpu"
    collect_ignore = [
        str(file) for file in folder.glob("*.py") if "\nimport triton" in file.read_text()
    ]
