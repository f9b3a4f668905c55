"""DP-FedAvg, simulated on one machine: users train locally, and their updates are averaged.

McMahan et al. 2018 (arXiv:1710.06963), Algorithm 1. Each round draws a Poisson sample of users.
Every user in it starts from the server's weights, takes a few steps of gradient descent on the own
records, and sends the difference. Differences are clipped, added, and get noise, like gradients:
the loss of a user below is linear in the weights, and its gradient is the user's difference. So the
price, the ledger, the tests of isolation and the audit are those of any run with users.
"""

from functools import partial

import torch
from torch.func import functional_call, vmap
from torch.nn import functional as F

import tacit
from tacit.training import Speed, Users

LOCAL_STEPS, LOCAL_RATE = 5, 0.5


def make_data(n_users: int = 600, seed: int = 0):
    """Return records of users, each of whom has an own shift of the features, and their ids."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 9, (n_users,), generator=generator)
    ids = torch.repeat_interleave(torch.arange(n_users), counts)
    own = torch.randn(n_users, 8, generator=generator)[ids]
    x = own + torch.randn(len(ids), 8, generator=generator)
    y = (x[:, :4].sum(1) > x[:, 4:].sum(1)).long()
    return x, y, ids


def fedavg_loss(model, batch):
    """Return one loss for each user, whose gradient is the weights before minus those after."""
    (x, y), counts = batch
    users, names = len(counts), [name for name, _ in model.named_parameters()]
    start = [p.detach().expand(users, *p.shape) for p in model.parameters()]
    named = partial(zip, names, strict=True)
    forward = vmap(lambda weights, x: functional_call(model, dict(named(weights)), (x,)))
    weights = start
    for _ in range(LOCAL_STEPS):  # every user has own weights, so the sum of losses is separate
        weights = [w.detach().requires_grad_() for w in weights]
        scores = forward(tuple(weights), x).flatten(0, 1)
        losses = F.cross_entropy(scores, y.flatten(), reduction="none").view(counts.shape)
        total = ((losses * counts).sum(1) / counts.sum(1).clamp_min(1)).sum()
        slopes = torch.autograd.grad(total, weights)
        weights = [w - LOCAL_RATE * slope for w, slope in zip(weights, slopes, strict=True)]
    moves = [(a - b).detach() for a, b in zip(start, weights, strict=True)]
    return sum(
        (p.expand(users, *p.shape) * move).reshape(users, -1).sum(1)
        for p, move in zip(model.parameters(), moves, strict=True)
    )


def main(rounds: int = 40) -> tuple[float, float]:
    """Train, and return the accuracy on new users and the epsilon of a user."""
    torch.manual_seed(0)
    x, y, ids = make_data()
    model = torch.nn.Linear(8, 2)
    server = torch.optim.SGD(model.parameters(), lr=1.0)
    private = tacit.make_private(
        model, server, (x, y), fedavg_loss,
        users=Users(ids=ids, records_per_user=8, combine="program"),
        batch_size=60, steps=rounds, clip_norm=0.5, noise_multiplier=1.0,
        speed=Speed(engine="loop"),
    )  # fmt: skip
    for lot in private:
        private.step(lot)
    x, y, _ = make_data(seed=1)
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == y).float().mean())
    return accuracy, private.epsilon(delta=1e-5)


if __name__ == "__main__":
    print("accuracy {:.3f} on new users, epsilon {:.2f} for a user".format(*main()))
