"""The most memory that torch holds at once on a CPU while a function runs."""

import gc
import json
import tempfile
import warnings
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run):
    """Return the peak of the bytes that torch allocates in `run`, above those held before."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")  # torch 2.11, of later cycles
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        profiler.start()
    try:
        run()
    finally:
        profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [e for e in events if e["name"] == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda e: e["ts"]):
        held += change["args"]["Bytes"]
        peak = max(peak, held)
    return peak
