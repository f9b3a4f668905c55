"""A loop in the manner of Accelerate: `private.backward` where `accelerator.backward` stood.

    python examples/accelerate_loop.py

The loop computes its own losses and calls its own optimizer; only the data loader and the backward
change. A lot that does not fit in memory comes in several batches, and until the last of them there
is no gradient, so `optimizer.step()` moves nothing. With Accelerate itself, give the model and the
optimizer to `accelerator.prepare` as usual and leave the data loader out.
"""

import torch
from torch import nn
from torch.nn import functional as F

import tacit

DELTA = 1e-4


def losses_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main() -> None:
    data = tacit.datasets.load("digits")
    x, y = torch.from_numpy(data.x_train).float().flatten(1), torch.from_numpy(data.y_train)
    x_test, y_test = torch.from_numpy(data.x_test).float().flatten(1), torch.from_numpy(data.y_test)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private = tacit.make_private(
        model, optimizer, (x, y), losses_of, batch_size=200, epochs=25,
        clip_norm=1.0, epsilon=6.0, delta=DELTA, max_microbatch=128,
    )  # fmt: skip

    model.train()
    for x_batch, y_batch in private.batches():  # was: in train_dataloader
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x_batch), y_batch, reduction="none")
        private.backward(losses)  # was: accelerator.backward(loss)
        optimizer.step()

    with torch.no_grad():
        accuracy = float((model(x_test).argmax(1) == y_test).float().mean())
    print(f"accuracy {accuracy:.3f}, epsilon {private.epsilon(delta=DELTA):.3f} at delta {DELTA:g}")


if __name__ == "__main__":
    main()
