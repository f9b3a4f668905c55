"""Train a Lightning module privately: `private.backward()` replaces `manual_backward(loss)`.

    pip install lightning
    python examples/lightning_loop.py

`configure_optimizers` makes the private run, because Lightning has put the module on its device by
then. The run is also the train loader: each batch is one lot, and each lot is one step. One pass is
the whole run, so `max_epochs` is 1. `training_step` computes nothing from a lot: the losses are
those of `loss_fn`, they are private, and nothing is returned or logged.
"""

import lightning
import torch
from torch import nn
from torch.nn import functional as F

import tacit

DELTA = 1e-4


def losses_of(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")  # one loss per example


class Classifier(lightning.LightningModule):
    def __init__(self, x, y):
        super().__init__()
        self.automatic_optimization = False
        self.network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.data = (x, y)

    def forward(self, x):
        return self.network(x)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        self.private = tacit.make_private(
            self, optimizer, self.data, losses_of, batch_size=200, epochs=10,
            clip_norm=1.0, epsilon=6.0, delta=DELTA,
        )  # fmt: skip
        return optimizer

    def train_dataloader(self):
        return self.private

    def training_step(self, _):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.private.backward()  # instead of: self.manual_backward(loss)
        optimizer.step()


torch.manual_seed(0)
y = torch.arange(3000) % 4
x = torch.randn(3000, 16) + 3.0 * F.one_hot(y, 16)
module = Classifier(x[:2000], y[:2000])
lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False).fit(module)
accuracy = float((module(x[2000:]).argmax(1) == y[2000:]).float().mean())
epsilon = module.private.epsilon(delta=DELTA)
print(f"accuracy {accuracy:.3f}, epsilon {epsilon:.3f} at delta {DELTA:g}")
