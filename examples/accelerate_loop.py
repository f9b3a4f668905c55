"""Train privately with Accelerate: `private.backward()` replaces `accelerator.backward(loss)`.

    pip install accelerate
    python examples/accelerate_loop.py

The loop calls its own optimizer; the data loader and the backward change, and the losses are those
of `losses_of`. A lot that does not fit in memory is split into microbatches of at most
`max_microbatch` rows, which are added before the noise. So keep `gradient_accumulation_steps=1`.
"""

import accelerate
import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.training import Speed

DELTA = 1e-4


def losses_of(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")  # one loss per example


torch.manual_seed(0)
y = torch.arange(3000) % 4
x = torch.randn(3000, 16) + 3.0 * F.one_hot(y, 16)

accelerator = accelerate.Accelerator()
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
private = tacit.make_private(  # after prepare, when the model is on its device
    model, optimizer, (x[:2000], y[:2000]), losses_of, batch_size=200, epochs=10,
    clip_norm=1.0, epsilon=6.0, delta=DELTA, speed=Speed(max_microbatch=128),
)  # fmt: skip

model.train()
for _ in private:  # instead of: train_dataloader
    optimizer.zero_grad()
    private.backward()  # instead of: accelerator.backward(loss)
    optimizer.step()

with torch.no_grad():
    guesses = model(x[2000:].to(accelerator.device)).argmax(1).cpu()
accuracy = float((guesses == y[2000:]).float().mean())
epsilon = private.epsilon(delta=DELTA)
accelerator.print(f"accuracy {accuracy:.3f}, epsilon {epsilon:.3f} at delta {DELTA:g}")
