"""Models that mix examples are refused before anything is spent."""

import pytest
import torch
from tacit.training.mixing import probe
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.errors import IncompatibleModel
from tacit.training import fix, make

CPU = torch.device("cpu")


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
    "norm", [nn.GroupNorm(2, 8), nn.LayerNorm([8, 4, 4]), nn.Dropout(0.5), nn.Identity()], ids=str
)
def test_layers_that_keep_examples_apart_pass_the_probe(norm):
    model = convolutional(norm)
    assert probe(model, cross_entropy, tuple(t[:3] for t in images()), CPU) > 0


class Centered(nn.Module):
    """Subtracts the batch mean, as a contrastive or whitening layer would."""

    def forward(self, x):
        return x - x.mean(0)


class Remembering(nn.Module):
    def __init__(self, counts_only):
        super().__init__()
        self.counts_only = counts_only
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.seen += 1.0 if self.counts_only else x.sum()
        return x


def test_the_probe_finds_batch_statistics_of_unknown_layers():
    with pytest.raises(IncompatibleModel, match="when another example changes"):
        attempt(convolutional(Centered()))


def test_the_probe_finds_a_gradient_that_mixes_though_the_loss_does_not():
    class Mixing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g + g.mean(0)

    class Layer(nn.Module):
        def forward(self, x):
            return Mixing.apply(x)

    with pytest.raises(IncompatibleModel, match="loss or gradient"):
        attempt(convolutional(Layer()))


def test_a_buffer_with_data_in_it_is_refused_and_a_counter_is_not():
    with pytest.raises(IncompatibleModel, match=r"buffer 1\.seen takes values"):
        attempt(convolutional(Remembering(counts_only=False)))
    model = convolutional(Remembering(counts_only=True))
    probe(model, cross_entropy, tuple(t[:3] for t in images()), CPU)
    assert model[1].seen.item() == 0.0  # put back after the probe


@pytest.mark.parametrize(
    ("loss_fn", "error", "advice"),
    [
        (lambda m, b: F.cross_entropy(m(b[0]), b[1]), ValueError, 'reduction="none"'),
        (lambda m, b: m(b[0]), ValueError, "got several axes"),
        (lambda m, b: cross_entropy(m, b)[:1], ValueError, "got another number of losses"),
        (lambda m, b: cross_entropy(m, b).detach(), ValueError, "must depend"),
        (lambda m, b: 1.0, TypeError, "must return a tensor"),
        (lambda m, b: cross_entropy(m, b).mean().expand(len(b[1])), IncompatibleModel, "another"),
        (lambda m, b: cross_entropy(m, b) / len(b[1]), IncompatibleModel, "divide by the batch"),
        (lambda m, b: cross_entropy(m, b)[[1, 0, 2][: len(b[1])]], IncompatibleModel, "another"),
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

    with pytest.raises(ValueError, match="one row for each record"):
        attempt(nn.Linear(4, 2), loss_fn=sequence_first, data=[*data], collate_fn=collate)


def test_the_probe_changes_nothing():
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


# The place that mixes.


class OwnForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) / x.norm()


class Attending(nn.Module):
    """Attention over the batch, as if it were a sequence."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(mixed)


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def contrastive(model, batch):
    x, _ = batch
    z = model(x)
    return -(z @ z.T).log_softmax(1).diagonal()


def start(model, loss_fn):
    torch.manual_seed(0)
    data = torch.randn(30, 4), torch.randint(0, 2, (30,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tacit.make_private(
        model, optimizer, data, loss_fn, batch_size=10, steps=1, clip_norm=1.0, noise_multiplier=1.0
    )


@pytest.mark.parametrize(
    ("model", "loss_fn", "place"),
    [
        (nn.Sequential(nn.Linear(4, 4), Centered(), nn.Linear(4, 2)), cross_entropy, r"1 \(Center"),
        (
            nn.Sequential(nn.Sequential(nn.Linear(4, 4), Centered()), nn.Linear(4, 2)),
            cross_entropy,
            r"0\.1 \(Centered\)",
        ),
        (OwnForward(), cross_entropy, "the forward of OwnForward itself"),
        (Attending(), cross_entropy, r"attention \(MultiheadAttention\)"),
        (nn.Linear(4, 2), contrastive, "in loss_fn"),
    ],
    ids=["layer", "inner layer", "own forward", "attention", "loss"],
)
def test_the_place_that_mixes_is_named(model, loss_fn, place):
    with pytest.raises(IncompatibleModel, match=place):
        start(model, loss_fn)


def test_no_hook_stays_behind():
    model = nn.Sequential(nn.Linear(4, 4), Centered(), nn.Linear(4, 2))
    with pytest.raises(IncompatibleModel):
        start(model, cross_entropy)
    assert not any(layer._forward_hooks for layer in model.modules())


class Table(nn.Module):
    """Embeddings whose gradients are sparse, by a layer or by a function."""

    def __init__(self, kind):
        super().__init__()
        self.table = kind(20, 2, sparse=True) if kind else nn.Embedding(20, 2)

    def forward(self, ids):
        if isinstance(self.table, nn.EmbeddingBag):
            return self.table(ids)
        return nn.functional.embedding(ids, self.table.weight, sparse=True).mean(1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, None])
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


class NamedByValue(nn.Linear):
    """Registers a buffer whose name holds a value of the batch, and writes into it."""

    def forward(self, x):
        name = f"b{int(x.max())}"
        if not hasattr(self, name):
            self.register_buffer(name, torch.zeros(1))
        getattr(self, name).add_(x.detach().max())
        return super().forward(x)


def test_refusals_state_no_name_or_size_that_comes_from_a_record():
    x = torch.randn(12, 4)
    x[0, 0] = 31337.0

    def losses(model, batch):
        return model(batch[0]).square().mean(1)

    def too_many(model, batch):
        return losses(model, batch).sum().expand(int(batch[0].max()))

    with pytest.raises(IncompatibleModel, match="a buffer takes values") as caught:
        attempt(NamedByValue(4, 2), loss_fn=losses, data=(x,))
    assert "31337" not in str(caught.value)
    with pytest.raises(ValueError, match="another number of losses") as caught:
        attempt(nn.Linear(4, 2), loss_fn=too_many, data=(x,))
    assert "31337" not in str(caught.value)
