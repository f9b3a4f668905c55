"""Train one private model on several ranks, as copies (DDP) or in shards (FSDP2).

    torchrun --nproc-per-node 2 examples/data_parallel.py
    torchrun --nproc-per-node 2 examples/data_parallel.py --shard

Every rank makes the same data set and the same model, and calls `make_private`. One lot is drawn
for all ranks; each clips its share. Noise is added once, and rank 0 pays.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tacit


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return one loss per example."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def main() -> None:
    """Train for two epochs and print the cost on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", action="store_true", help="FSDP2 in place of DDP")
    is_sharded = parser.parse_args().shard
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = f"cuda:{dist.get_rank() % torch.cuda.device_count()}" if cuda else "cpu"
    torch.manual_seed(0)  # the same first weights on every rank
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model.to(device)
    if is_sharded:
        fully_shard(model[2])
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = load_digits(return_X_y=True)
    records = torch.tensor(x / 16).float().to(device), torch.tensor(y).to(device)
    private = tacit.make_private(
        model, optimizer, records, losses,
        batch_size=256, epochs=2, clip_norm=1.0, epsilon=3.0, delta=1e-5,
    )  # fmt: skip
    for batch in private:
        private.step(batch)
    if dist.get_rank() == 0:
        print(f"epsilon {private.epsilon(delta=1e-5):.3f} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
