"""Layers, parameters and losses that cannot be trained are refused before anything is spent."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.errors import IncompatibleModel
from tacit.training import fix, make


def images(n=12):
    torch.manual_seed(0)
    return torch.randn(n, 3, 6, 6), torch.arange(n) % 2


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def convolutional(norm):
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))


def attempt(model, *, loss_fn=cross_entropy, data=None, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"batch_size": 4, "steps": 2, "clip_norm": 1.0, "noise_multiplier": 1.0}
    data = images() if data is None else data
    return tacit.make_private(model, optimizer, data, loss_fn, **(settings | options))


def frozen(layer):
    return layer.requires_grad_(False)


MIXING = {
    "plain": nn.BatchNorm2d(8),
    "without scale and shift": nn.BatchNorm2d(8, affine=False),
    "frozen but in train mode": frozen(nn.BatchNorm2d(8)),
    "without running statistics": nn.BatchNorm2d(8, track_running_stats=False),
    "without running statistics, in eval mode": nn.BatchNorm2d(8, track_running_stats=False).eval(),
    "synchronized": nn.SyncBatchNorm(8),
}


@pytest.mark.parametrize("norm", MIXING.values(), ids=MIXING)
def test_batch_norm_is_refused_in_every_form_that_mixes(norm):
    """Peers, entry 10."""
    with pytest.raises(IncompatibleModel, match=r"^1 \(.*BatchNorm.*GroupNorm"):
        attempt(convolutional(norm))


def test_frozen_batch_norm_in_eval_mode_may_stay():
    model = convolutional(frozen(nn.BatchNorm2d(8)))
    model[1].eval()
    run = attempt(model)
    before = model[1].running_mean.clone()
    for lot in run:
        run.step(lot)
    assert torch.equal(model[1].running_mean, before)


def test_a_norm_put_back_into_train_mode_stops_the_run():
    model = convolutional(nn.BatchNorm2d(8)).eval()
    run = attempt(model)
    model.train()
    lot = next(iter(run))
    with pytest.raises(IncompatibleModel, match="mixes examples"):
        run.step(lot)
    assert run.steps_taken == 0


def test_instance_norm_must_not_keep_running_statistics():
    with pytest.raises(IncompatibleModel, match="track_running_stats=False"):
        attempt(convolutional(nn.InstanceNorm2d(8, track_running_stats=True)))
    attempt(convolutional(nn.InstanceNorm2d(8, affine=True)))


@pytest.mark.parametrize(
    ("loss_fn", "error", "advice"),
    [
        (lambda m, b: F.cross_entropy(m(b[0]), b[1]), ValueError, 'reduction="none"'),
        (lambda m, b: m(b[0]), ValueError, "got several axes"),
        (lambda m, b: cross_entropy(m, b)[:1], ValueError, "got another number of losses"),
        (lambda m, b: cross_entropy(m, b).detach(), ValueError, "must depend"),
        (lambda m, b: 1.0, TypeError, "must return a tensor"),
        (lambda m, b: cross_entropy(m, b).mean().expand(len(b[1])), IncompatibleModel, "at mean"),
        (lambda m, b: cross_entropy(m, b) / len(b[1]), IncompatibleModel, "at div"),
        (lambda m, b: cross_entropy(m, b).flip(0), IncompatibleModel, "at flip"),
    ],
    ids=[
        "mean",
        "two axes",
        "too few",
        "detached",
        "number",
        "expanded mean",
        "divided",
        "mixed up",
    ],
)
def test_a_loss_that_is_not_one_per_example_is_explained(loss_fn, error, advice):
    with pytest.raises(error, match=advice):
        attempt(convolutional(nn.ReLU()), loss_fn=loss_fn)


def test_a_batch_whose_first_dimension_is_not_the_examples_is_refused():
    def sequence_first(model, batch):
        return model(batch[0]).mean((1, 2))

    data = torch.randn(12, 5, 4)

    def collate(records):
        return (torch.stack(records, dim=1),)  # (5, batch, 4)

    with pytest.raises(ValueError, match="must count the examples"):
        attempt(nn.Linear(4, 2), loss_fn=sequence_first, data=[*data], collate_fn=collate)


def test_a_run_that_is_set_up_has_changed_nothing():
    model, data = convolutional(nn.Dropout(0.5)), images()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    attempt(model, data=data)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_trainable_parameters_is_refused():
    model = frozen(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no trainable parameters"):
        attempt(model, data=(torch.randn(9, 2), torch.arange(9) % 2))


def test_the_optimizer_must_hold_the_models_parameters_and_no_others():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    data = (torch.randn(9, 2), torch.arange(9) % 2)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"2 parameter\(s\) that the model does not have"):
        attempt(model, data=data, optimizer=both)
    some = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(ValueError, match="trainable parameter bias"):
        attempt(model, data=data, optimizer=some)
    with pytest.raises(ValueError, match="LBFGS"):
        attempt(model, data=data, optimizer=torch.optim.LBFGS(model.parameters()))


def test_parameters_shared_with_another_optimizer_are_refused_until_its_run_is_over():
    model = nn.Linear(2, 2)
    data = (torch.randn(9, 2), torch.arange(9) % 2)
    first = attempt(model, data=data)
    with pytest.raises(ValueError, match="shared with another optimizer"):
        attempt(model, data=data)
    for lot in first:
        first.step(lot)
    second = attempt(model, data=data)
    del second
    attempt(model, data=data)


def test_fix_swaps_batch_norm_and_keeps_scale_and_shift():
    model = convolutional(nn.BatchNorm2d(8))
    with torch.no_grad():
        model[1].weight.fill_(2.0)
    fixed = fix(model)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[1].weight.tolist() == [2.0] * 8
    assert isinstance(model[1], nn.BatchNorm2d)  # the original is untouched
    attempt(fixed)


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 7, 12, 64, 96])
def test_fix_finds_groups_that_divide_and_do_not_vanish(channels):
    fixed = fix(nn.BatchNorm1d(channels))
    assert channels % fixed.num_groups == 0
    x = torch.randn(5, channels)
    assert channels < 4 or fixed(x).std() > 0.5


def test_fix_stops_instance_norm_from_tracking():
    fixed = fix(convolutional(nn.InstanceNorm2d(8, track_running_stats=True)))
    attempt(fixed)
    assert not list(fixed.buffers())


def test_fix_asks_for_channels_of_a_lazy_layer():
    with pytest.raises(ValueError, match="run the model once"):
        fix(nn.Sequential(nn.LazyBatchNorm2d()))


def test_a_run_that_was_refused_claims_nothing():
    model = convolutional(nn.BatchNorm2d(8))
    with pytest.raises(IncompatibleModel):
        attempt(model)
    assert not any(id(model[0].weight) in ids for ids, _ in make._RUNS.values())


class Table(nn.Module):
    """Embeddings whose gradients are sparse, by a layer or by a function."""

    def __init__(self, kind):
        super().__init__()
        self.table = kind(20, 2, sparse=True) if kind else nn.Embedding(20, 2)

    def forward(self, ids):
        if isinstance(self.table, nn.EmbeddingBag):
            return self.table(ids)
        return nn.functional.embedding(ids, self.table.weight, sparse=True).mean(1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_in_a_sentence(kind):
    with pytest.raises(IncompatibleModel, match="sparse=False"):
        attempt(Table(kind), data=(torch.randint(0, 20, (9, 3)), torch.arange(9) % 2))


def test_an_optimizer_for_sparse_gradients_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with pytest.raises(ValueError, match="Use Adam"):
        tacit.make_private(
            model, optimizer, (torch.randn(9, 2),), lambda m, b: m(b[0]).sum(1),
            batch_size=3, steps=1, clip_norm=1.0, noise_multiplier=1.0,
        )  # fmt: skip


class Spectral(nn.Module):
    """A filter with complex weights, stored as complex or as pairs of real numbers."""

    def __init__(self, is_complex):
        super().__init__()
        filters = torch.randn(3, 2, dtype=torch.cfloat)
        self.filters = nn.Parameter(filters if is_complex else torch.view_as_real(filters).clone())

    def forward(self, x):
        filters = self.filters
        if not filters.is_complex():
            filters = torch.view_as_complex(filters)
        return (torch.fft.rfft(x) @ filters).abs()


def test_complex_parameters_are_refused_in_a_sentence_that_helps():
    data = (torch.randn(9, 4), torch.arange(9) % 2)
    with pytest.raises(ValueError, match="view_as_complex"):
        attempt(Spectral(True), data=data)
    attempt(Spectral(False), data=data)
