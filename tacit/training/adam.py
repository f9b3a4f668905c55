"""DP-Adam with bias correction: Adam that subtracts the noise's variance."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tacit._check import positive


class AdamBC(torch.optim.Optimizer):
    """Adam whose second moment is corrected for the noise of DP-SGD.

    The mean of a squared noisy gradient is the squared gradient plus the noise's variance. Under
    privacy the variance is much the larger, so Adam degenerates to momentum SGD. DP-AdamBC (Tang,
    Shpilevskiy & Lécuyer 2023, arXiv:2312.14334, Algorithm 1) divides by
    sqrt(max(v - noise_variance, floor)) instead, where v is Adam's second moment. The noise's scale
    is public, so this is post-processing. `make_private` passes the scale to the optimizer before
    each step; without `make_private` this is Adam with a floor in place of its epsilon.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = AdamBC([weight], lr=0.1)
    >>> weight.grad = torch.tensor([3.0, -3.0])
    >>> optimizer.step()
    >>> weight.detach()
    tensor([-0.1000,  0.1000])
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],  # Any: torch's parameter groups
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 5e-8,
        weight_decay: float = 0.0,
    ) -> None:
        positive(lr=lr)
        positive(floor=floor)
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor, "decay": weight_decay})
        self._noise_std: dict[int, float] = {}

    def state_noise(self, stds: Iterable[tuple[Tensor, float]]) -> None:
        """Set the standard deviation of the noise in the next gradient of each parameter."""
        self._noise_std = {id(parameter): std for parameter, std in stds}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Move every parameter that has a gradient.

        `closure`, if given (Lightning always gives one), is called first; it may compute the
        gradients. Returns what `closure` returned, or None.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return result

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
            state["variance"] = 0.0
        first, second = group["betas"]
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        # The noise may follow a schedule, so its variance is averaged as the squares are.
        variance = self._noise_std.get(id(parameter), 0.0) ** 2
        state["variance"] += (1 - second) * (variance - state["variance"])
        unbias = 1 - second ** state["step"]
        square = (state["square"] - state["variance"]) / unbias
        parameter.mul_(1 - group["lr"] * group["decay"])
        scale = group["lr"] / (1 - first ** state["step"])
        parameter.addcdiv_(state["mean"], square.clamp_min(group["floor"]).sqrt(), value=-scale)


def tell_noise(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[Tensor],
    scales: Iterable[float],
    noise_std: float,
) -> None:
    """State the noise's scale to an optimizer that corrects for noise; it is a public number.

    `noise_std` is that of the mean gradient of a parameter whose scale is 1.
    """
    state_noise = getattr(optimizer, "state_noise", None)
    if state_noise is not None:
        pairs = zip(parameters, scales, strict=True)
        state_noise((parameter, noise_std * scale) for parameter, scale in pairs)
