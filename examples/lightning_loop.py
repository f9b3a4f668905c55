"""A loop in the manner of Lightning: the trainer owns it, the module's `training_step` is yours.

    python examples/lightning_loop.py

`Trainer` below makes the calls that Lightning's makes under manual optimization. There, set
`self.automatic_optimization = False`, use `self.optimizers()`, and fit with
`train_dataloaders=run.batches()`. Do not log the losses: they are private.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tacit

DELTA = 1e-4


class Classifier(nn.Module):
    """What would be a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.private: tacit.training.Private | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="none")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> None:
        assert self.private is not None
        optimizer.zero_grad()
        self.private.backward(self.losses(batch))  # was: self.manual_backward(loss)
        optimizer.step()


class Trainer:
    """The order of Lightning's calls, and nothing else."""

    def fit(self, module: Classifier, optimizer: torch.optim.Optimizer, batches: Iterable) -> None:
        module.train()
        for batch in batches:
            module.training_step(batch, optimizer)


def main() -> None:
    data = tacit.datasets.load("digits")
    x, y = torch.from_numpy(data.x_train).float().flatten(1), torch.from_numpy(data.y_train)
    x_test, y_test = torch.from_numpy(data.x_test).float().flatten(1), torch.from_numpy(data.y_test)

    torch.manual_seed(0)
    module = Classifier()
    optimizer = module.configure_optimizers()
    module.private = run = tacit.make_private(
        module, optimizer, (x, y), Classifier.losses, batch_size=200, epochs=25,
        clip_norm=1.0, epsilon=6.0, delta=DELTA,
    )  # fmt: skip
    Trainer().fit(module, optimizer, run.batches())
    with torch.no_grad():
        accuracy = float((module(x_test).argmax(1) == y_test).float().mean())
    print(f"accuracy {accuracy:.3f}, epsilon {run.epsilon(delta=DELTA):.3f} at delta {DELTA:g}")


if __name__ == "__main__":
    main()
