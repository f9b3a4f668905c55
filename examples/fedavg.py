"""DP-FedAvg, simulated on one machine: users train locally, and their updates are averaged.

McMahan et al. 2018 (arXiv:1710.06963), Algorithm 1. Each round draws a Poisson sample of users.
Every user in it starts from the server's weights, takes a few steps of gradient descent on the own
records, and sends the difference. Differences are clipped, added, and get noise, like gradients:
the loss of a user below is linear in the weights, and its gradient is the user's difference. So the
price, the ledger, the certificate and the audit are those of any run with users.

The local gradient is written out, for softmax regression. With `torch.autograd.grad` in its place
any model would do, but the program could not be traced, and would run on one user at a time.
"""

import torch
from torch.nn import functional as F

import tacit
from tacit.training import Users

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
    (x, y), counts = batch  # (users, slots, features), (users, slots), which slots count
    share = counts / counts.sum(1, keepdim=True).clamp_min(1)
    label = F.one_hot(y, model.out_features).to(x.dtype)
    weight = model.weight.detach().expand(len(x), -1, -1)  # every user has own ones
    bias = model.bias.detach().expand(len(x), -1)
    for _ in range(LOCAL_STEPS):
        guess = (x @ weight.mT + bias.unsqueeze(1)).softmax(2)
        error = (guess - label) * share.unsqueeze(2)
        weight = weight - LOCAL_RATE * error.mT @ x
        bias = bias - LOCAL_RATE * error.sum(1)
    moves = ((model.weight, weight), (model.bias, bias))
    return sum((p * (p.detach() - after)).flatten(1).sum(1) for p, after in moves)


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
    )  # fmt: skip
    for lot in private:
        private.step(lot)
    x, y, _ = make_data(seed=1)
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == y).float().mean())
    return accuracy, private.epsilon(delta=1e-5)


if __name__ == "__main__":
    print("accuracy {:.3f} on new users, epsilon {:.2f} for a user".format(*main()))
