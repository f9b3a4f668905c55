"""What is trained in a run of an audit: a model with the optimizer and the average of its owner.

All that a training keeps besides its releases is here: weights, buffers, the state of the optimizer
and an average of weights. It has to follow from the releases alone. So a trainee notes what its
optimizer got in a step and fingerprints of what the step left, and a fresh one follows the steps.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tacit._arrays import Floats


class TraineeStep(NamedTuple):
    """What the optimizer got in a step, and fingerprints of what the step left, by name."""

    gradient: Floats
    noise: list[float]  # of each parameter, for optimizers that are told how large it is
    left: dict[str, bytes]


class Trainee:
    """A model, its optimizer, the average of its weights, and its steps if they are noted."""

    def __init__(
        self,
        model: Any,  # Any: types of torch, here and below
        optimizer: Callable[[list[Any]], Any],
        average: Callable[[Any], Any] | None = None,
        *,
        is_noted: bool = False,
    ) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.parameters)
        self.average: Any = None if average is None else average(model)
        self.steps: list[TraineeStep] = []
        self._got, self._noise = np.zeros(0), []
        self._is_noted = is_noted
        if is_noted:
            self._listen()

    @property
    def gradient(self) -> Floats:
        """The gradients of all parameters, in one row."""
        return _row([p.grad for p in self.parameters])

    @property
    def weights(self) -> Floats:
        """All parameters that are trained, in one row."""
        return _row(self.parameters)

    def end_step(self) -> None:
        """Update the average after a step of the optimizer, and note the step if that is asked."""
        if self.average is not None:
            self.average.update()
        if self._is_noted:
            self.steps.append(TraineeStep(self._got, self._noise, self._left()))

    def follow(self, step: TraineeStep) -> dict[str, bool]:
        """Take a step of another trainee from its gradient alone; say what is left as it was."""
        import torch

        sizes = [p.numel() for p in self.parameters]
        parts = np.split(step.gradient, np.cumsum(sizes)[:-1])
        for p, part in zip(self.parameters, parts, strict=True):
            p.grad = torch.tensor(part, dtype=p.dtype, device=p.device).view_as(p)
        if step.noise:
            self.optimizer.state_noise(zip(self.parameters, step.noise, strict=True))
        self.optimizer.step()
        self.end_step()
        return {name: left == step.left[name] for name, left in self.steps[-1].left.items()}

    def resume(self, before: "Trainee") -> None:
        """Continue from the states of another trainee, as a process does that is started again."""
        self.model.load_state_dict(before.model.state_dict())
        self.optimizer.load_state_dict(before.optimizer.state_dict())
        if self.average is not None:
            self.average.load_state_dict(before.average.state_dict())
        self.steps = before.steps

    def _left(self) -> dict[str, bytes]:
        states: dict[str, Any] = {
            "gradients": [p.grad for p in self.parameters],
            "weights": list(self.model.parameters()),
            "buffers": list(self.model.buffers()),
            "states of the optimizer": self.optimizer.state_dict(),
            "average weights": self.average and self.average.state_dict(),
        }
        return {name: fingerprint(state) for name, state in states.items()}

    def _listen(self) -> None:
        """Note what the optimizer gets. With the hook, a GPU takes its steps as a CPU does."""

        def before_step(*_: Any) -> None:
            self._got = self.gradient

        self.optimizer.register_step_pre_hook(before_step)
        if (genuine := getattr(self.optimizer, "state_noise", None)) is not None:

            def state_noise(stds: Any) -> None:
                listed = list(stds)
                self._noise = [std for _, std in listed]
                genuine(listed)

            self.optimizer.state_noise = state_noise


def fingerprint(state: Any) -> bytes:  # Any: numbers and tensors in containers
    """Return a hash of all numbers in `state`; text is left out, as runs have random names.

    >>> fingerprint({"run": "a", "step": [1, 2.0]}) == fingerprint({"run": "b", "step": [1, 2.0]})
    True
    """
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, list | tuple):
        found = b"".join(fingerprint(one) for one in state)
    elif hasattr(state, "detach"):
        found = _row([state]).tobytes()
    else:
        found = b"" if isinstance(state, str) else repr(state).encode()
    return hashlib.sha256(found).digest()


def _row(tensors: list[Any]) -> Floats:
    return np.concatenate([t.detach().double().reshape(-1).cpu().numpy() for t in tensors])
