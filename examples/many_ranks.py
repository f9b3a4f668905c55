"""Train on several processes, GPUs or machines: each one computes its part of every lot.

    torchrun --nproc-per-node 2 examples/many_ranks.py

All ranks get the same records and call `make_private` with the same arguments. tacit divides each
lot among them, adds up their clipped sums, adds noise once and gives every rank the same gradient.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tacit

DELTA = 1e-4


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = f"cuda:{dist.get_rank() % torch.cuda.device_count()}" if cuda else "cpu"
    torch.manual_seed(0)  # the same records and weights on every rank
    x = torch.randn(4_000, 8, device=device)
    y = (x[:, 0] + x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = tacit.make_private(
        model, optimizer, (x, y), loss_fn,
        batch_size=400, epochs=5, clip_norm=1.0, epsilon=3.0, delta=DELTA,
    )  # fmt: skip
    for batch in private:
        private.step(batch)
    if dist.get_rank() == 0:
        with torch.no_grad():
            right = (model.module(x).argmax(1) == y).float().mean()
        print(f"accuracy {right:.2f} at epsilon {private.epsilon(delta=DELTA):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
