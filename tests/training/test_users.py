"""Users as the unit of privacy of training: sums, samples, prices and refusals."""

import numpy as np
import pandas as pd
import pytest
import torch
from looped_reference import set_up
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.accounting import for_group
from tacit.errors import IncompatibleModel, UnsupportedEvent
from tacit.events import Gaussian, GaussianMixture, PoissonSampled, Repeated
from tacit.ledger import Ledger
from tacit.sampling import RandomAllocation
from tacit.training import AdaptiveClip, Flat, Users, Views, advise_sampling, clipped_sum
from tacit.training.users import losses_by_user

N = 90
IDS = [f"person {number}" for number in np.random.default_rng(0).integers(0, 25, N)]
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(N) % 3


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def make_run(users, *, model=None, data=(X, Y), loss=loss_fn, **options):
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"batch_size": 8, "steps": 2, "clip_norm": 0.2, "noise_multiplier": 1.0}
    settings |= {"seed": 1, "check": False} | options
    return tacit.make_private(model, optimizer, data, loss, users=users, **with_speed(settings))


def looped(model, members, combine, clip_norm):
    """Sum over users of the clipped mean or sum of their records' gradients, one by one."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for rows in members:
        losses = loss_fn(model, (X[rows], Y[rows]))
        loss = losses.mean() if combine == "mean" else losses.sum()
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        norm = float(sum(g.square().sum() for g in gradient)) ** 0.5
        for part, g in zip(total, gradient, strict=True):
            part += min(1.0, clip_norm / norm) * g
    return torch.cat([part.flatten() for part in total])


def members_of(run, step):
    names = list(dict.fromkeys(IDS))
    drawn = run._lots.indices(step)
    return [np.flatnonzero([one == names[user] for one in IDS]) for user in drawn]


@pytest.mark.parametrize("way", ["traced", "alone"])
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_the_sum_of_users_is_that_of_a_loop(combine, way):
    users = Users(ids=IDS, records_per_user=20, combine=combine)
    with set_up(way):
        run = make_run(users, max_microbatch=3)
    for lot in run:
        sums = run._lot_sum(lot, run._clip())[0].sums
        found = torch.cat([part.flatten() for part in sums.values()])
        expected = looped(run._model, members_of(run, lot.step), combine, 0.2)
        assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())
        run.step(lot)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised inside the compiler
def test_the_compiled_sum_of_users_is_that_of_a_loop():
    run = make_run(Users(ids=IDS, records_per_user=20), compile=True)
    for lot in run:
        sums = run._lot_sum(lot, run._clip())[0].sums
        found = torch.cat([part.flatten() for part in sums.values()])
        expected = looped(run._model, members_of(run, lot.step), "mean", 0.2)
        assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())
        run.step(lot)


def test_segments_of_a_clipped_sum_are_clipped_once_each():
    model, ids = make_model(), torch.tensor([int(one.split()[1]) for one in IDS])
    found = clipped_sum(model, loss_fn, (X, Y), Flat(0.2), segments=ids)
    members = [np.flatnonzero(ids.numpy() == user) for user in ids.unique().tolist()]
    expected = looped(model, members, "mean", 0.2)
    sums = torch.cat([part.flatten() for part in found.sums.values()])
    assert float((sums - expected).norm()) <= 1e-6 * float(expected.norm())


def test_a_user_with_many_records_moves_a_step_by_one_clip_norm():
    x, y = torch.ones(40, 4, dtype=torch.float64), torch.zeros(40, dtype=torch.long)
    ids = ["many"] * 30 + [f"other {i}" for i in range(10)]
    moved = []
    for keep in (slice(0, 40), slice(30, 40)):
        run = make_run(
            Users(ids=ids[keep], records_per_user=4, combine="sum"), data=(x[keep], y[keep]),
            n_records=11, batch_size=11, noise_multiplier=1e-9, clip_norm=1e-3, steps=1,
        )  # fmt: skip
        run.step(next(iter(run)))
        moved.append(torch.cat([p.grad.flatten() for p in run._model.parameters()]))
    assert float((moved[0] - moved[1]).norm()) * 11 <= 1e-3 * (1 + 1e-4)


def test_runs_with_users_pay_for_users():
    run = make_run(IDS)
    assert run.event == Repeated(PoissonSampled(8 / len(set(IDS)), Gaussian(1.0)), 2)
    assert run.ledger.unit == "user"
    assert run.info["n_records"] == len(set(IDS))


def test_record_sampling_is_priced_as_a_mixture_of_at_most_k_records():
    run = make_run(Users(ids=IDS, records_per_user=3, sampled="records"))
    assert isinstance(run.event.event, GaussianMixture)
    kept = len(run._lots.records)
    assert kept == sum(min(3, IDS.count(one)) for one in set(IDS))
    record = Repeated(PoissonSampled(8 / kept, Gaussian(1.0)), 2)
    assert run.event == for_group(record, 3)


def test_adaptive_counts_of_record_sampling_have_sensitivity_k():
    rule = AdaptiveClip(1.0, count_noise_std=2.0)
    run = make_run(Users(ids=IDS, records_per_user=3, sampled="records"), clip_norm=rule)
    # Gradient and counts move together: 1 / sigma^2 adds up, with counts of noise 2 / 0.5 = 4.
    assert run.event.event.noise_multiplier == pytest.approx((1 + 1 / 16) ** -0.5)


def test_the_bill_does_not_depend_on_how_many_records_users_have():
    users = Users(ids=range(N), records_per_user=3, sampled="records")
    assert isinstance(make_run(users).event.event, GaussianMixture)


def test_users_may_be_a_column_of_a_table():
    table = pd.DataFrame({"a": X[:, 0].numpy(), "y": Y.numpy(), "who": IDS})

    def loss(model, batch):
        assert set(batch) == {"a", "y"}
        return F.cross_entropy(model(batch["a"][:, None]), batch["y"], reduction="none")

    run = make_run("who", data=table, loss=loss, model=nn.Linear(1, 3).double())
    run.step(next(iter(run)))


class Numbered(torch.utils.data.Dataset):
    """Records with their numbers, of which a `collate_fn` takes each once."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return i, X[i], Y[i]

    @staticmethod
    def collate(records):
        once = {record[0]: record for record in records}.values()
        return torch.stack([r[1] for r in once]), torch.stack([r[2] for r in once])


def test_a_data_set_is_asked_for_each_record_once():
    run = make_run(IDS, data=Numbered(), collate_fn=Numbered.collate)
    assert weights_after(run) == pytest.approx(weights_after(make_run(IDS)), abs=1e-9)


def weights_after(run):
    for lot in run:
        run.step(lot)
    return torch.cat([p.detach().flatten() for p in run._model.parameters()]).tolist()


def centered_by_user(model, batch):
    """The records of one user see each other, those of different users do not."""
    (x, y), counts = batch
    mean = (x * counts[..., None]).sum(1, keepdim=True) / counts.sum(1)[:, None, None]
    return losses_by_user(loss_fn, "mean", model, ((x - mean, y), counts))


def centered(model, batch):
    x, y = batch
    return loss_fn(model, (x - x.mean(0), y))


def scaled_by_size(model, batch):
    return loss_fn(model, batch) * len(batch[0])


def with_the_next_user(model, batch):
    (x, y), counts = batch
    return losses_by_user(loss_fn, "mean", model, ((x + x.roll(1, 0), y), counts))


@pytest.mark.parametrize(
    ("loss", "combine"),
    [(centered, "mean"), (scaled_by_size, "mean"), (with_the_next_user, "program")],
)
def test_programs_that_mix_users_are_refused(loss, combine):
    with pytest.raises(IncompatibleModel):
        make_run(Users(ids=IDS, combine=combine), loss=loss, check=True)


def test_records_of_one_user_may_see_each_other():
    users = Users(ids=IDS, records_per_user=4, combine="program")
    run = make_run(users, loss=centered_by_user, check=True)
    weights_after(run)
    assert run.steps_taken == 2


def test_augmentation_sees_the_views_of_a_record_side_by_side():
    seen = []

    def augment(batch):
        x, y = batch
        seen.append(bool((x[0::2] == x[1::2]).all()))
        return x, y

    run = make_run(Users(ids=IDS, records_per_user=4), augment=Views(2, augment))
    plain = make_run(Users(ids=IDS, records_per_user=4))
    for one in (run, plain):
        one.step(next(iter(one)))
    pairs = zip(run._model.parameters(), plain._model.parameters(), strict=True)
    assert all(seen)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in pairs)


@pytest.mark.parametrize(
    ("users", "what"),
    [
        ([None] * N, "missing id"),
        (np.r_[np.nan, np.arange(N - 1)], "missing id"),
        (["", *IDS[1:]], "missing id"),
        (pd.array([pd.NA] * N), "missing id"),
        (IDS[1:], "one id for each record"),
        ("who", "column"),
    ],
)
def test_ids_that_do_not_fit_are_refused(users, what):
    with pytest.raises(ValueError, match=what):
        make_run(users)


@pytest.mark.parametrize("users", [[object()] * N, [1] * 45 + ["1"] * 45, 7])
def test_ids_of_other_types_are_refused(users):
    with pytest.raises(TypeError, match="users"):
        make_run(users)


def test_units_are_not_mixed():
    with pytest.raises(ValueError, match="one record"):
        make_run(IDS, ledger=Ledger())
    with pytest.raises(ValueError, match="one person"):
        make_run(None, ledger=Ledger(unit="person"))
    declared = Ledger(unit="person")
    declared.declare_one_record_each()
    assert make_run(None, ledger=declared).ledger.unit == "person"


def test_replacing_a_user_is_refused_for_record_sampling():
    ledger = Ledger(unit="user", relation="replace_one")
    with pytest.raises(UnsupportedEvent, match="replacing a user"):
        make_run(Users(ids=IDS, sampled="records"), ledger=ledger)
    assert make_run(IDS, ledger=ledger).epsilon(delta=1e-5) > make_run(IDS).epsilon(delta=1e-5)


def by_program(model, batch):
    records, counts = batch
    return losses_by_user(loss_fn, "mean", model, (records, counts))


@pytest.mark.parametrize("combine", ["mean", "sum", "program"])
@pytest.mark.parametrize("rows", [64, 3])
def test_loops_of_others_take_the_same_steps(combine, rows):
    users = Users(ids=IDS, records_per_user=20, combine=combine)
    loss = by_program if combine == "program" else loss_fn
    expected = make_run(users, loss=loss)
    run = make_run(users, loss=loss, max_microbatch=rows)
    for lot in expected:
        expected.step(lot)
    for lot in run:
        run._optimizer.zero_grad()
        if combine == "program":
            (x, y), mask = lot  # for a look at shapes
            assert x.shape[:2] == y.shape == mask.shape
        else:
            x, y = lot  # a row for each slot
            assert len(x) == len(y)
        run.backward()
        run._optimizer.step()
    pairs = zip(run._model.parameters(), expected._model.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in pairs)
    assert run.steps_taken == 2


def test_slots_that_do_not_count_change_nothing():
    model, mask = make_model(), torch.tensor([[True, False], [True, True]])
    rows = (X[[0, 0, 1, 2]].view(2, 2, 4), Y[[0, 0, 1, 2]].view(2, 2))
    losses = losses_by_user(loss_fn, "mean", model, (rows, mask))
    alone = loss_fn(model, (X[:3], Y[:3]))
    assert torch.allclose(losses, torch.stack([alone[0], alone[1:].mean()]))


def test_advice_follows_the_noise():
    facts = {"n_users": 2500, "n_records": 10_000, "records_per_user": 8, "delta": 1e-5}
    few = advise_sampling(**facts, rate=0.01, steps=300, epsilon=0.5)
    assert few.sampled == "users"
    assert few.noise_by_users < few.noise_by_records
    assert advise_sampling(**facts, rate=0.01, steps=300, epsilon=8.0).sampled == "records"


def test_ids_of_another_order_than_the_table_are_refused():
    table = pd.DataFrame({"x": np.arange(6.0), "who": [0, 0, 1, 1, 2, 2]})
    with pytest.raises(ValueError, match="another index"):
        make_run(table["who"].sample(frac=1, random_state=0), data=table)


def test_a_bound_beyond_all_records_takes_no_memory():
    run = make_run(Users(ids=IDS, records_per_user=10**9), check=True)
    run.step(next(iter(run)))
    assert run.steps_taken == 1


def test_steps_of_a_run_at_record_level_are_never_those_of_users():
    plan = {"n_records": N, "batch_size": 8}
    records = make_run(None, **plan)
    records.step(next(iter(records)))
    state = records.state_dict()
    for users in (IDS, np.arange(N)):
        of_users = make_run(users, **plan)
        assert of_users.event == records.event
        with pytest.raises(ValueError, match="one record, but this run"):
            of_users.load_state_dict(state)


def test_random_allocation_of_users_with_several_records_is_refused():
    with pytest.raises(UnsupportedEvent, match="random allocation"):
        make_run(Users(ids=IDS, sampled="records"), batch_size=RandomAllocation(2))
