"""What is compared on synthetic records before a run, and what follows."""

import re
import warnings

import numpy as np
import pytest
import torch
from clean_programs import PROGRAMS
from looped_reference import set_up
from mixing_cases import CASES, Case
from slow_cases import one_fast
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.errors import IncompatibleModel
from tacit.training.key import randomness
from tacit.training.program.replayed_draws import LotDraws

BY_CONSTRUCTION = "by construction: one traced program per example"


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        for kind in (RuntimeWarning, UserWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)  # slow programs, batching fallbacks
        yield


def private(case, *, way="traced", lr=0.0, **options):
    optimizer = torch.optim.SGD(case.model.parameters(), lr=lr)
    settings = {"batch_size": 64, "steps": 2, "clip_norm": 1.0, "noise_multiplier": 1.0, "seed": 0}
    settings |= {"collate_fn": case.collate_fn, "augment": case.augment}
    with set_up(way):
        return tacit.make_private(
            case.model, optimizer, case.dataset, case.loss_fn, **with_speed(settings | options)
        )


def case_of(model, loss_fn, x, classes=3):
    y = torch.arange(len(x)) % classes
    return Case(model, loss_fn, (x, y), "most")


def ce(out, y):
    return F.cross_entropy(out, y, reduction="none")


# Programs that mean something else for a lot ------------------------------------------------------

PLACES = {  # what the refusal names
    "class_weights_balanced_in_the_lot": "at bincount",
    "a_layer_with_batch_statistics_of_its_own": r"in 1 \(Module\), at mean",
    "contrastive_loss": "loss_fn, at matmul",
    "divided_by_the_drawn_size": "loss_fn, at div",
    "mixup_with_a_random_partner": "at getitem",
    "the_dropout_rate_follows_the_size_of_the_lot": "at dropout",
    "only_lots_of_usual_size_are_centered": "at mean",
    "gradients_are_normalized_over_the_lot": "backward pass",
    "a_bfloat16_model_sees_the_row_before": "at roll",
    "float8_rows_and_class_weights": "at bincount",
    "functional_batch_norm": "not on one example",
    "a_statistic_in_a_file": "keeps something of its record in a place that cannot be named",
    "a_number_read_out_and_kept": "keeps something of its record in .*scale",
    "a_buffer_of_running_statistics": "writes into model.mean",
    "collate_standardizes_the_batch": "collate_fn makes something else",
    "augmentation_mixes_rows": "augment makes something else",
    "padding_to_the_longest_record": "PadTo",
    "labels_smoothed_by_the_frequencies_in_the_lot": "at bincount",
    "pairwise_ranking_loss": "at sub",
    "softmax_over_the_batch": "at log_softmax",
    "centered_rows_and_draws_that_depend_on_the_records": "at mean",
    "cutmix_by_numpy_in_half_of_the_lots": "at flip",
}


@pytest.mark.parametrize("name", PLACES)
def test_what_combines_examples_is_named(name):
    case = CASES[name]()
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    with pytest.raises(IncompatibleModel, match=PLACES[name]):
        private(case)
    assert all(torch.equal(v, before[k]) for k, v in case.model.state_dict().items())


# Not seen: what data sets read, what happens by chance or late, and memory in places that Python
# does not show, such as files and generators.
UNSEEN = re.compile(
    "data_set|chance|in_half|late|calls|every_|moved|file|environment|generator|context|database"
    "|bytes|address|noise|draws|seed|saved_by_torch|large_feature|dropout_of_whole|alike"
)


@pytest.mark.slow
def test_programs_that_combine_examples_are_refused():
    names = [n for n, build in CASES.items() if build().reach == "most" and not UNSEEN.search(n)]
    accepted = []
    for name in names:
        try:
            private(CASES[name]())
            accepted.append(name)
        except IncompatibleModel:
            pass
    assert len(accepted) <= len(names) / 20, accepted


class Encoder(nn.Module):
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = layer, nn.Linear(8, 3)

    def forward(self, x):
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.out(self.layer(x, x, x)[0].mean(1))
        found = self.layer(x)
        return self.out((found[0] if isinstance(found, tuple) else found).mean(1))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(8, 8),
        nn.GRU(8, 8),
        nn.MultiheadAttention(8, 2),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_missing_batch_first_is_named(layer):
    case = case_of(Encoder(layer), lambda m, b: ce(m(b[0]), b[1]), torch.randn(40, 5, 8))
    with pytest.raises(IncompatibleModel, match=r"in layer[a-z_.]* \(.*batch_first=True"):
        private(case, batch_size=8)


def test_a_routers_balancing_loss_is_named():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.out = nn.Linear(6, 4), nn.Linear(6, 3)

        def forward(self, x):
            shares = self.router(x).softmax(1)
            return self.out(x) * shares.amax(1, keepdim=True), shares

    class Router(nn.Linear):
        def forward(self, x):
            self.balance = super().forward(x).softmax(1).mean(0)
            return super().forward(x) + 0.1 * self.balance

    model = Routed()
    model.router = Router(6, 4)
    case = case_of(model, lambda m, b: ce(m(b[0])[0], b[1]), torch.randn(40, 6))
    with pytest.raises(IncompatibleModel, match=r"in router \(.*at mean.*balancing"):
        private(case, batch_size=8)


# Programs that do not -----------------------------------------------------------------------------

DRAWING = re.compile("dropout|noise|random|draws|heavy_tails|crops|system|augmentation|generator")


@pytest.mark.parametrize("name", one_fast(PROGRAMS, 6))
def test_programs_that_keep_examples_apart_train_as_written(name):
    weights = []
    for way in ("traced", "alone"):
        case = PROGRAMS[name]()
        run = private(
            case,
            way=way,
            lr=0.3,
            noise_multiplier=0.0,
            batch_size=6,
            steps=20,
            check=way == "traced",
        )
        for lot in run:
            run.step(lot)
        weights.append(torch.cat([p.detach().double().flatten() for p in case.model.parameters()]))
    assert run.isolation != BY_CONSTRUCTION
    if not _draws(name):
        is_low = re.search("bfloat16|autocast|float8", name)
        unit = 0.02 if is_low else 1e-4
        assert float((weights[0] - weights[1]).norm()) < unit * float(weights[1].norm())


def _draws(name):
    """Whether two calls of a program, from the same state of torch's generator, draw numbers."""
    case = PROGRAMS[name]()
    run = private(case, way="alone", batch_size=6, check=False)
    batch = run._lots.records.fetch(np.arange(6))
    found = []
    for seed in (0, 1):
        with randomness(seed, torch.device("cpu")):
            found.append(case.loss_fn(case.model, batch).detach())
    return not torch.equal(*found) or DRAWING.search(name) is not None


@pytest.mark.parametrize("kind", ["function", "hook"])
def test_a_backward_of_its_own_is_kept_or_runs_in_the_loop(kind):
    class Rounded(torch.autograd.Function):
        """Straight through: the derivative of rounding is taken to be one."""

        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, g):
            return g

    def loss_fn(m, b):
        hidden = m[0](b[0])
        if kind == "hook":
            hidden.register_hook(lambda g: g.clamp(-0.01, 0.01))
        else:
            hidden = Rounded.apply(hidden)
        return ce(m[2](hidden), b[1])

    gradients = []
    for way in ("traced", "alone"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
        options = {"noise_multiplier": 0.0, "batch_size": 8, "check": way == "traced"}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run = private(case_of(model, loss_fn, x), way=way, **options)
        if way == "traced" and run.isolation == "one record at a time":
            texts = [str(w.message) for w in seen if w.category is RuntimeWarning]
            assert re.search("gradients would be others.*times as long as a plain step", texts[0])
        run.step(next(iter(run)))
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_program_that_reads_values_runs_in_the_loop_and_says_where():
    def loss_fn(m, b):
        losses = ce(m(b[0]), b[1])
        return losses * 2 if losses.sum() > 5 else losses

    case = case_of(nn.Linear(6, 3), loss_fn, torch.randn(40, 6))
    with pytest.raises(IncompatibleModel, match=r"at gt|at sum"):  # the sum is one over the lot
        private(case)

    def by_row(m, b):
        losses = ce(m(b[0]), b[1])
        return torch.stack([row * 2 if row > 1 else row for row in losses])

    case = case_of(nn.Linear(6, 3), by_row, torch.randn(40, 6))
    with pytest.warns(RuntimeWarning, match=r"needs the value of a tensor.*if row > 1"):
        run = private(case, batch_size=8)
    assert run.isolation == "one record at a time"
    assert run.arithmetic.mode == "formed"
    for lot in run:
        run.step(lot)


def test_a_language_model_in_bfloat16_is_not_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()

    def loss_fn(m, batch):
        (ids,) = batch
        out = m(input_ids=ids, use_cache=False).logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(out.float(), ids[:, 1:], reduction="none").mean(1)

    ids = torch.randint(300, (20, 16))
    run = private(Case(model, loss_fn, ids, "none"), batch_size=4)
    assert run.isolation == BY_CONSTRUCTION
    run.step(next(iter(run)))


# No record moves a sum by more than C -------------------------------------------------------------


def sum_of(name, records, seed):
    """The clipped sum of the second step of a run on these records."""
    torch.manual_seed(0)
    case = CASES[name]()
    data = case.dataset
    data = torch.utils.data.TensorDataset(*data) if isinstance(data, tuple) else data
    case = Case(case.model, case.loss_fn, torch.utils.data.Subset(data, records.tolist()), "most",
                case.collate_fn, case.augment)  # fmt: skip
    run = private(case, noise_multiplier=0.0, batch_size=len(records), seed=seed, check=False)
    for lot in run:
        run.step(lot)
    parameters = [p for p in case.model.parameters() if p.requires_grad]
    return torch.cat([p.grad.flatten() for p in parameters]) * len(records)


# Memory that a watcher of Python's values does not see, in programs that cannot be traced.
OUTSIDE = re.compile("data_set|file|environment|address|saved_by_torch|default_type|warning")


@pytest.mark.parametrize("name", one_fast([n for n in CASES if not OUTSIDE.search(n)], 12))
def test_no_record_moves_a_sum_by_more_than_the_clip_norm(name):
    """Without the comparison, so that programs run whose meaning it would refuse."""
    rows = np.arange(10)
    try:
        base, other = (sum_of(name, rows, seed) for seed in (0, 1))
        added = sum_of(name, np.append(rows, 99), 0)
        replaced = sum_of(name, np.where(rows == 5, 101, rows), 0)
    except (IncompatibleModel, ValueError, RuntimeError):
        return  # refused, or it does not run: nothing is released
    if torch.equal(base, other):  # else it draws other numbers in a longer lot
        assert float((added - base).norm()) <= 1 + 1e-5
    assert float((replaced - base).norm()) <= 2 + 1e-5


# Random numbers -----------------------------------------------------------------------------------


def test_examples_are_given_their_part_of_a_lots_numbers():
    def drawn(x, rate):
        return F.dropout(x, rate) + torch.randn_like(x), torch.rand(3), torch.randperm(4)

    draws, x = LotDraws(5), torch.ones(5, 4)
    with draws.recorded():
        whole = drawn(x, 0.5)
    alone = []
    for i in range(5):
        with draws.of_example(i):
            alone.append(drawn(x[i : i + 1], 0.5))
    with draws.of_all():
        mapped = torch.func.vmap(lambda row: drawn(row, 0.5), randomness="different")(x[:, None])
    assert torch.equal(torch.cat([a[0] for a in alone]), whole[0])
    assert torch.equal(mapped[0][:, 0], whole[0])
    for place in (1, 2):  # one draw for the lot
        assert all(torch.equal(a[place], whole[place]) for a in alone)
        assert torch.equal(mapped[place], whole[place].expand(5, -1))
    assert draws.is_matched
    with draws.of_example(0):
        drawn(x[:1], 0.4)
    assert not draws.is_matched
