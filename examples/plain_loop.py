"""A complete private training script: a ledger, three lines around the loop, and a checkpoint.

    python examples/plain_loop.py [FOLDER]

It trains on scikit-learn's digits. Run it twice with the same folder: the second run loads the
checkpoint of the finished training, and the ledger is not charged again. Keep the checkpoint as
private as the data.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tacit

DELTA = 1e-4  # below 1 / number of records


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")  # one loss per example


def main(folder: Path) -> None:
    data = tacit.datasets.load("digits")
    x, y = torch.from_numpy(data.x_train).float().flatten(1), torch.from_numpy(data.y_train)
    x_test, y_test = torch.from_numpy(data.x_test).float().flatten(1), torch.from_numpy(data.y_test)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    ledger = tacit.Ledger(folder / "digits.ledger", budget=tacit.Budget(epsilon=8.0, delta=DELTA))
    checkpoint = tacit.training.Checkpoint(
        path=folder / "checkpoint.pt", also={"scheduler": scheduler}
    )
    private = tacit.make_private(
        model, optimizer, (x, y), loss_fn, batch_size=200, steps=200,
        clip_norm=1.0, epsilon=6.0, delta=DELTA, ledger=ledger, checkpoint=checkpoint,
    )  # fmt: skip

    for batch in private:
        private.step(batch)
        scheduler.step()

    with torch.no_grad():
        accuracy = float((model(x_test).argmax(1) == y_test).float().mean())
    print(f"accuracy {accuracy:.3f}, epsilon {private.epsilon(delta=DELTA):.3f} at delta {DELTA:g}")
    print(f"ledger: {ledger.history()[-1]}; left: {ledger.remaining()}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
