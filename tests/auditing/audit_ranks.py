"""Run by `test_training_audit.py` under torchrun: audit one fault, or none; print the verdict."""

import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

faults = SimpleNamespace(**run_path(str(Path(__file__).parent / "faults.py")))


def main():
    name, how = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        if name != "correct":
            faults.FAULTS[name].plant(patch)
        found = faults.audit_step(0, how=how)
    print(f"rank {dist.get_rank()}: {'passes' if found.passes else 'flagged'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
