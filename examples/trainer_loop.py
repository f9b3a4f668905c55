"""A loop in the manner of the Hugging Face Trainer: records are mappings, the loop is not yours.

    python examples/trainer_loop.py

`Trainer` below makes the calls that the Trainer of transformers makes. There, override
`get_train_dataloader` to return `run.batches()`, and `training_step` as here. It returns zero
because the Trainer logs what it returns, and losses are private.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tacit

DELTA = 1e-4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.network(x)}


def losses_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(inputs["x"])["logits"], inputs["labels"], reduction="none")


class Trainer:
    """The order of the Trainer's calls, with the one override that privacy needs."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, run) -> None:
        self.model, self.optimizer, self.run = model, optimizer, run

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        model.train()
        self.run.backward(losses_of(model, inputs))  # was: self.accelerator.backward(loss)
        return torch.zeros(())

    def train(self) -> None:
        for inputs in self.run.batches():
            self.training_step(self.model, inputs)
            self.optimizer.step()
            self.model.zero_grad()


def main() -> None:
    data = tacit.datasets.load("digits")
    x, y = torch.from_numpy(data.x_train).float().flatten(1), torch.from_numpy(data.y_train)
    x_test, y_test = torch.from_numpy(data.x_test).float().flatten(1), torch.from_numpy(data.y_test)

    records = [{"x": row, "labels": label} for row, label in zip(x, y, strict=True)]

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = tacit.make_private(
        model, optimizer, records, losses_of, batch_size=200, epochs=25,
        clip_norm=1.0, epsilon=6.0, delta=DELTA,
    )  # fmt: skip
    Trainer(model, optimizer, run).train()
    with torch.no_grad():
        accuracy = float((model(x_test)["logits"].argmax(1) == y_test).float().mean())
    print(f"accuracy {accuracy:.3f}, epsilon {run.epsilon(delta=DELTA):.3f} at delta {DELTA:g}")


if __name__ == "__main__":
    main()
