"""State of a private run, and what resuming it costs.

A checkpoint holds the key, so a resumed run draws the same lots and adds the same noise: steps that
were taken after the checkpoint and lost are repeated bit for bit, and the same release twice is one
release. So the bill stays the plan's. That needs a deterministic computation and the same program;
model and optimizer must be those of the checkpoint, which the next step checks. To change anything,
say `lost_steps`: they are paid as extra steps, and the run goes on with a fresh key. A checkpoint
is as secret as the data: who has the key can subtract the noise.
"""

import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tacit._check import whole
from tacit.events import Event
from tacit.events import Sequence as EventSequence
from tacit.training.plan import EpochSampler, Plan

VERSION = 1
State = dict[str, Any]  # Any: JSON values


def check(state: State, fingerprint: dict[str, Any]) -> None:
    """Raise `ValueError` unless `state` comes from a run with the same plan."""
    if state.get("version") != VERSION:
        raise ValueError(f"state must be of version {VERSION}, got {state.get('version')!r}.")
    saved = state["plan"]
    for name, value in fingerprint.items():
        if saved.get(name) != value:
            raise ValueError(
                f"state comes from a run with another {name}. A run may only be resumed as it was "
                "planned: the same noise on another computation would cancel out of the difference."
            )


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Fingerprint of what decides the next steps; None for sharded models, which go unchecked."""
    found = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, DTensor):
            return None
        found.update(name.encode() + _bytes(tensor))
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        states = [optimizer.state.get(p, {}) for p in group["params"]]
        for values in (options, *states):
            for name in sorted(values):
                found.update(name.encode() + _bytes(values[name]))
    return found.hexdigest()


def check_digest(expected: str | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` if the run would repeat its noise on other gradients."""
    if expected is not None and digest(model, optimizer) != expected:
        raise ValueError(
            "model or optimizer are not those of the checkpoint that private was loaded from, so "
            "the same noise would fall on other gradients and cancel out of the difference. Load "
            "all three from one moment, or say lost_steps= in load_state_dict (0 if no step was "
            "taken after the checkpoint) to go on with fresh noise."
        )


def lost_event(plan: Plan, steps_taken: int, lost_steps: int) -> Event:
    """What the steps after the checkpoint did, when they are not repeated but paid."""
    whole(lost_steps=lost_steps)
    sampler = plan.sampler
    if isinstance(sampler, EpochSampler) and steps_taken % sampler.steps:
        raise ValueError(
            "lost_steps can only be given for a checkpoint at the end of an epoch: in the middle "
            "of one, fresh randomness would let a record take part twice."
        )
    multipliers = plan.noise_multipliers[steps_taken : steps_taken + lost_steps]
    return plan.event_of(multipliers) if multipliers else EventSequence(())


def warn_if_not_repeatable(device: torch.device) -> None:
    """A GPU may add in another order the second time, and then the noise is not on the same sum."""
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        warnings.warn(
            "steps taken after this checkpoint are repeated with the same noise, which is sound if "
            "their gradients are bit for bit the same. Call torch.use_deterministic_algorithms"
            "(True) in every run, or say lost_steps= (0 if no step was taken after it).",
            stacklevel=3,
        )


def _bytes(value: Any) -> bytes:  # Any: options and state of any optimizer
    if isinstance(value, Tensor) and value.dim():
        return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, Tensor):
        value = value.item()
    return repr(list(value) if isinstance(value, tuple) else value).encode()
