"""Run by `test_distributed.py` under torchrun: jobs `mode:kind` in, each rank's results as JSON."""

import copy
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.training import AdaptiveClip, Banded, NoisyLoss, Users

LOSS = NoisyLoss(upper=2.0)
USERS = {"users": Users(ids=[i * i % 23 for i in range(64)]), "batch_size": 5}


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def make(kind, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    model.register_buffer("constant", torch.ones(1))  # DDP sends buffers in each forward pass
    x = torch.randn(64, 4)
    y = (x.sum(1) > 0).long()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"batch_size": 16, "steps": 5, "clip_norm": 0.5, "noise_multiplier": 1.0, "seed": 3}
    private = tacit.make_private(
        model, optimizer, (x, y), loss_fn, **with_speed(settings | options)
    )
    return private, model, optimizer


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def trained(kind, **options):
    """Final weights, and every gradient that was released."""
    seen = []
    private, model, _ = make(kind, callbacks=[seen.append], **options)
    gradients = []
    for lot in private:
        private.step(lot)
        gradients.append(torch.cat([full(p.grad).flatten() for p in model.parameters()]).tolist())
    weights = torch.cat([full(p).flatten() for p in model.parameters()]).tolist()
    found = {"weights": weights, "gradients": gradients, "steps": private.steps_taken}
    is_first = not dist.is_initialized() or dist.get_rank() == 0  # it alone calls callbacks
    is_reported = len(seen) == (private.steps_taken if is_first else 0)
    return found | {"losses": private.noisy_losses, "is_reported": is_reported}


def foreign(kind, **options):
    """Somebody else's loop, which looks at each lot and steps its own optimizer."""
    private, model, optimizer = make(kind, noise_multiplier=0.0, **options)
    gradients = []
    for lot in private:
        assert len(tuple(lot)) == 2
        optimizer.zero_grad()
        private.backward()
        gradients.append(torch.cat([full(p.grad).flatten() for p in model.parameters()]).tolist())
        optimizer.step()
    weights = torch.cat([full(p).flatten() for p in model.parameters()]).tolist()
    return {"weights": weights, "gradients": gradients, "steps": private.steps_taken}


def accumulated(kind):
    """No optimizer step between two calls of backward: all ranks refuse the second one."""
    private, _, optimizer = make(kind)
    lots, words = iter(private), ""
    next(lots)
    private.backward()
    next(lots)
    try:
        private.backward()
    except RuntimeError as error:
        words = str(error)
    optimizer.zero_grad(set_to_none=False)  # discards the release
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        private.backward()
    return {"words": words, "warnings": len(seen), "steps": private.steps_taken}


def refused(kind):
    """The budget is too small: every rank must hear of it, and none may hang."""
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=1e-3, delta=1e-6))
    private, model, _ = make(kind, ledger=ledger)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        private.step(next(iter(private)))
    except tacit.errors.BudgetExceeded:
        same = all(map(torch.equal, before, [p.detach() for p in model.parameters()]))
        return {"refused": True, "unchanged": same}
    return {"refused": False}


def file_ledger(kind, path):
    """One file, opened by every rank: charged once."""
    ledger = tacit.Ledger(path)
    private, _, _ = make(kind, ledger=ledger)
    for lot in private:
        private.step(lot)
    dist.barrier()
    return {"entries": len(ledger.history())}


def restarted(kind):
    """A checkpoint of every rank is loaded after steps were lost; rank 0 alone pays for them."""
    private, model, optimizer = make(kind, seed=None)
    state, momentum = private.state_dict(), copy.deepcopy(optimizer.state_dict())
    for lot in private:
        private.step(lot)
    again, copied, other = make(kind, seed=None, ledger=private.ledger)
    with torch.no_grad():
        for p, value in zip(copied.parameters(), model.parameters(), strict=True):
            p.copy_(value)
    other.load_state_dict(momentum)
    states = [state]
    dist.broadcast_object_list(states)  # one checkpoint for all ranks
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        again.load_state_dict(states[0], lost_steps="pay")
    for lot in again:
        again.step(lot)
    return {
        "reasons": [str(warning.message) for warning in seen],
        "entries": len(private.ledger.history()),
        "key": again._lots.key.bytes("test", 0, 8).hex(),
        "is_fresh": again._lots.key != private._lots.key,
        "repaid": again.info["repaid"],
        "weights": [full(p).flatten().tolist() for p in copied.parameters()],
    }


def different_start(kind):
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    try:
        tacit.make_private(
            model, optimizer, data, loss_fn, batch_size=2, steps=1, clip_norm=1.0,
            noise_multiplier=1.0,
        )  # fmt: skip
    except ValueError as error:
        return {"error": str(error)}
    return {}


def shuffled_data(kind):
    """Every rank has the same records, in another order on one of them."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(32.0).view(8, 4)
    rows = torch.arange(8).roll(dist.get_rank())
    data = (x[rows], torch.zeros(8, dtype=torch.long))
    try:
        tacit.make_private(
            model, optimizer, data, loss_fn, batch_size=2, steps=1, clip_norm=1.0,
            noise_multiplier=1.0,
        )  # fmt: skip
    except ValueError as error:
        return {"error": str(error)}
    return {}


def mixing_on_one_rank(kind):
    """The last rank alone finds that examples mix: all of them must end."""

    def centered(model, batch):
        x, y = batch
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return F.cross_entropy(model(x - x.mean(0) if is_last else x), y, reduction="none")

    model = nn.Linear(4, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (torch.arange(256.0).view(64, 4).sin(), torch.arange(64) % 2)
    try:
        tacit.make_private(
            model, optimizer, data, centered, batch_size=16, steps=1, clip_norm=1.0,
            noise_multiplier=1.0,
        )  # fmt: skip
    except tacit.errors.IncompatibleModel as error:
        return {"error": str(error)}
    return {}


def other_users(kind):
    """The same records belong to other users on one rank."""
    ids = [i * i % (23 + dist.get_rank()) for i in range(64)]
    try:
        make(kind, users=ids, batch_size=5, n_records=12)
    except ValueError as error:
        return {"error": str(error)}
    return {}


MODES = {
    "trained": lambda kind, folder: trained(kind, max_microbatch=5, noisy_loss=LOSS),
    "fresh": lambda kind, folder: trained(kind, seed=None),
    "tiny": lambda kind, folder: trained(kind, batch_size=1, n_records=640, steps=40),
    "noise": lambda kind, folder: trained(kind, batch_size=1, n_records=10**8, steps=300),
    "adaptive": lambda kind, folder: trained(kind, clip_norm=AdaptiveClip(1.0)),
    "banded": lambda kind, folder: trained(
        kind, noise=Banded(bands=4), steps=12, max_microbatch=5, noisy_loss=LOSS
    ),
    "foreign": lambda kind, folder: foreign(kind),
    "cut": lambda kind, folder: foreign(kind, max_microbatch=2),
    "users": lambda kind, folder: trained(kind, **USERS, max_microbatch=2),
    "users_cut": lambda kind, folder: foreign(kind, **USERS, max_microbatch=2),
    "other_users": lambda kind, folder: other_users(kind),
    "uneven": lambda kind, folder: foreign(kind, max_microbatch=2 + dist.get_rank()),
    "sparse": lambda kind, folder: foreign(kind, batch_size=1, n_records=128, steps=12),
    "accumulated": lambda kind, folder: accumulated(kind),
    "refused": lambda kind, folder: refused(kind),
    "ledger": lambda kind, folder: file_ledger(kind, Path(folder) / f"{kind}.ledger"),
    "different": lambda kind, folder: different_start(kind),
    "restarted": lambda kind, folder: restarted(kind),
    "mixing": lambda kind, folder: mixing_on_one_rank(kind),
    "shuffled": lambda kind, folder: shuffled_data(kind),
}


def main():
    folder, *jobs = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    torch.set_num_threads(1)
    results = {}
    for job in jobs:
        mode, kind = job.split(":")
        results[job] = MODES[mode](kind, folder)
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
