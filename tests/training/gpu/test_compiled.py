"""The compiled sum is the eager one, for any clip scale, with padding and non-finite rows."""

import pytest
import torch
from looped_reference import compiled_sum
from torch import nn
from torch.nn import functional as F

from tacit.errors import IncompatibleModel
from tacit.training import Flat, Speed, clipped_sum, make_private
from tacit.training.gpu.compiled import CompiledSum, NotCompiled
from tacit.training.gpu.graph_pair import _compiler, _own
from tacit.training.lots.padding import Padding
from tacit.training.program.one_example import Untraceable
from tacit.training.program.programs import Programs
from tacit.training.rules import ghost_norm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised inside the compiler
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # so is this
]


def losses(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def relative(found, wanted):
    gap = sum((found.sums[k] - v).square().sum() for k, v in wanted.sums.items())
    return float((gap / sum(v.square().sum() for v in wanted.sums.values())).sqrt())


@pytest.fixture(scope="module")
def setting():
    model = network()
    batch = torch.randn(6, 1, 8, 8), torch.randint(0, 3, (6,))
    return model, batch, compiled_sum(model, losses, Flat(0.5))


@pytest.mark.smoke
def test_the_compiled_sum_is_the_eager_one(setting):
    model, batch, compiled = setting
    weights = torch.tensor([1.0, 1, 1, 1, 0, 0])
    for scale in (1.0, 0.3):
        wanted = clipped_sum(model, losses, batch, Flat(0.5 * scale), weights=weights)
        found = compiled(batch, weights, scale)
        assert relative(found, wanted) < 1e-5
        assert torch.equal(found.within, wanted.within)


@pytest.mark.smoke
def test_without_torchs_compiler_the_same_sum_is_computed_after_a_warning(monkeypatch):
    monkeypatch.delattr("functorch.compile.min_cut_rematerialization_partition")
    model, weights = network(), torch.tensor([1.0, 1, 1, 1, 0, 0])
    batch = torch.randn(6, 1, 8, 8), torch.randint(0, 3, (6,))
    batch[0][1] = float("nan")
    compiled = compiled_sum(model, losses, Flat(0.5))
    _compiler.cache_clear()
    try:
        with pytest.warns(UserWarning, match="compile=True has no effect"):
            found = compiled(batch, weights, 0.3)
        assert not compiled.all_finite()
        batch[0][1] = 0.0
        compiled.begin()
        found = compiled(batch, weights, 0.3)  # without another warning
    finally:
        _compiler.cache_clear()
    assert compiled.all_finite()
    assert compiled.draws
    wanted = clipped_sum(model, losses, batch, Flat(0.15), weights=weights)
    assert relative(found, wanted) < 1e-5


def test_the_optimizers_steps_are_seen(setting):
    model, batch, compiled = setting
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    weights = torch.ones(6)
    assert relative(compiled(batch, weights), clipped_sum(model, losses, batch, Flat(0.5))) < 1e-5


def test_parameters_that_moved_are_found_again(setting):
    model, batch, compiled = setting
    for p in model.parameters():
        p.data = p.data + 0.1  # another tensor, as after model.to(...)
    wanted = clipped_sum(model, losses, batch, Flat(0.5))
    assert relative(compiled(batch, torch.ones(6)), wanted) < 1e-5


def test_a_row_that_is_not_finite_is_reported(setting):
    _, (x, y), compiled = setting
    spoiled = x.clone()
    spoiled[2] = float("nan")
    for first, second in ((x, spoiled), (spoiled, x), (x, x)):
        compiled.begin()
        compiled((first, y), torch.ones(6))
        compiled((second, y), torch.ones(6))
        assert compiled.all_finite() == (first is second)


def test_a_record_that_is_not_finite_adds_nothing_to_a_compiled_run():
    x, y = torch.randn(24, 1, 8, 8), torch.randint(0, 3, (24,))
    x[5] = float("nan")
    ends = []
    for is_compiled in (False, True):
        model = network()
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            (x, y),
            losses,
            batch_size=24,
            steps=3,
            clip_norm=0.5,
            noise_multiplier=0.0,
            speed=Speed(max_microbatch=10, compile=is_compiled, check=False),
            seed=1,
        )
        for lot in private:
            private.step(lot)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.isfinite(ends[0]).all()
    assert torch.allclose(*ends, atol=1e-5)


def test_one_compilation_serves_every_number_of_rows(monkeypatch):
    model, traced = network(), []
    compiled = compiled_sum(model, losses, Flat(0.5))
    trace = CompiledSum._traced
    monkeypatch.setattr(CompiledSum, "_traced", lambda *a: traced.append(1) or trace(*a))
    for rows in (20, 17, 31, 64):
        batch = torch.randn(rows, 1, 8, 8), torch.randint(0, 3, (rows,))
        wanted = clipped_sum(model, losses, batch, Flat(0.5))
        assert relative(compiled(batch, torch.ones(rows)), wanted) < 1e-5
    assert len(traced) == 1
    assert not compiled.has_fixed_rows


def test_one_compilation_serves_every_number_of_examples_with_views():
    model = nn.Linear(4, 3)
    compiled = compiled_sum(model, losses, Flat(0.5), augmentations=3)
    for rows in (8, 5, 12):
        batch = torch.randn(3 * rows, 4), torch.randint(0, 3, (3 * rows,))
        wanted = clipped_sum(model, losses, batch, Flat(0.5), augmentations=3)
        assert relative(compiled(batch, torch.ones(rows)), wanted) < 1e-5
    assert not compiled.has_fixed_rows


def test_a_program_is_compiled_again_by_the_compilers_cache(tmp_path, monkeypatch):
    # The cache compares numbers of rows, by guards that may name the inputs of a graph only.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for views in (1, 3):
        model, batch = nn.Linear(4, 3), (torch.randn(24, 4), torch.randint(0, 3, (24,)))
        for _ in range(2):
            compiled = compiled_sum(model, losses, Flat(0.5), augmentations=views)
            wanted = clipped_sum(model, losses, batch, Flat(0.5), augmentations=views)
            assert relative(compiled(batch, torch.ones(24 // views)), wanted) < 1e-5


def with_exp(model, batch):
    x, y = batch
    return (F.linear(x, model.weight.exp(), model.bias) - y).square().sum(1)


def test_a_program_that_fixes_the_rows_is_compiled_for_each_number():
    model = nn.Linear(4, 2)
    compiled = compiled_sum(model, with_exp, Flat(50.0))
    for rows in (8, 7, 8):
        batch = torch.randn(rows, 4), torch.randn(rows, 2)
        wanted = clipped_sum(model, with_exp, batch, Flat(50.0))
        assert relative(compiled(batch, torch.ones(rows)), wanted) < 1e-5
    assert compiled.has_fixed_rows


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head, self.drop = nn.Linear(4, 4), nn.Linear(4, 2), nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.hidden(x) + self.shift)))


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(1)


@pytest.mark.filterwarnings("ignore:.* changed, which the program")
def test_graphs_do_not_outlive_what_they_were_built_for():
    torch.manual_seed(0)
    model, batch = Small().eval(), (torch.randn(6, 4), torch.randn(6, 2))
    compiled, rows = compiled_sum(model, squares, Flat(0.1)), torch.ones(6)

    def check():
        found, wanted = compiled(batch, rows), clipped_sum(model, squares, batch, Flat(0.1))
        assert found.sums.keys() == wanted.sums.keys()
        assert relative(found, wanted) < 1e-5

    check()
    assert not compiled.draws
    model.shift.fill_(1.0)
    check()
    model.shift = torch.full((4,), -2.0)  # another tensor
    check()
    model.hidden.weight.requires_grad_(False)
    check()
    model.hidden.weight.requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = compiled(batch, rows), clipped_sum(model, squares, batch, Flat(0.1))
        assert relative(found, wanted) < 1e-2
    model.train()
    compiled._programs.begin_lot()
    compiled.begin()
    assert compiled.draws  # before the graph is built: its first step must be seeded too
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(compiled(batch, rows).sums["head.weight"])
    assert torch.equal(drawn[0], drawn[1])  # building moves no random stream
    assert not torch.equal(drawn[0], drawn[2])


def test_records_of_another_shape_than_the_program_was_traced_for_are_refused():
    model, batch, rows = Small().eval(), (torch.randn(6, 4), torch.randn(6, 2)), torch.ones(6)
    programs = Programs(model, squares)
    programs.prepare(batch)
    compiled = CompiledSum(model, squares, Flat(0.1), programs)
    compiled(batch, rows)
    with pytest.raises(Untraceable, match="another shape or type"):
        compiled((batch[0], torch.randn(6, 1)), rows)


def run_of(model, loss_fn, *, compile):
    data = torch.randn(24, 4), torch.randint(0, 2, (24,))
    options = {"batch_size": 24, "steps": 4, "clip_norm": 0.5, "noise_multiplier": 0.0, "seed": 1}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options["speed"] = Speed(compile=compile, check=False)
    return make_private(model, optimizer, data, loss_fn, **options)


def test_a_model_that_writes_into_its_buffers_is_refused():
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))
    with pytest.raises(IncompatibleModel, match="writes into"):
        run_of(model, losses, compile=True)


@pytest.mark.parametrize("stage", ["partition", "_plain"])
def test_auto_runs_as_it_is_wherever_the_compiler_fails(monkeypatch, stage):
    def failing(*_):
        raise NotImplementedError("no lowering for label 7")

    monkeypatch.setattr(f"tacit.training.gpu.compiled.{stage}", failing)
    model = nn.Linear(4, 2)
    private = run_of(model, losses, compile=False)
    private._lot_sum._compiled = compiled_sum(model, losses, Flat(0.5))
    private._lot_sum._may_fail = True
    private._lots.padding = Padding(multiple=2, limit=64)
    with pytest.warns(RuntimeWarning, match="compiler raised NotImplementedError") as warned:
        private.step(next(iter(private)))
    assert "label" not in str(warned[0].message)
    assert private.steps_taken == 1


class Annealed:
    def __init__(self):
        self.weight = 1.0

    def __call__(self, model, batch):
        x, y = batch
        return self.weight * F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.filterwarnings("ignore:loss_fn.weight changed")
def test_a_changed_python_value_is_seen_and_one_that_keeps_changing_ends_the_compilation():
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(4, 2), Annealed()
    batch, rows = (torch.randn(6, 4), torch.randint(0, 2, (6,))), torch.ones(6)
    compiled = compiled_sum(model, loss_fn, Flat(50.0))
    for weight in (1.0, 3.0):
        loss_fn.weight = weight
        compiled._programs.begin_lot()
        compiled.begin()
        wanted = clipped_sum(model, loss_fn, batch, Flat(50.0))
        assert relative(compiled(batch, rows), wanted) < 1e-5
    loss_fn.weight = 2.0
    compiled._programs.begin_lot()
    compiled.begin()
    with pytest.raises(NotCompiled, match=r"changes \(loss_fn.weight\)"):
        compiled(batch, rows)


def test_layers_with_equal_gradients_are_added_once():
    # The compiler computes equal things once; two sums in one place would be added twice.
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.one(x) + self.other(x)

    model, rows = Twins(), torch.ones(6)
    compiled = compiled_sum(model, losses, Flat(0.5))
    first, second = ((torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(2))
    found = compiled(first, rows)
    assert len({total.data_ptr() for total in found.sums.values()}) == len(found.sums)
    found += compiled(second, rows)
    wanted = clipped_sum(model, losses, first, Flat(0.5))
    wanted += clipped_sum(model, losses, second, Flat(0.5))
    assert relative(found, wanted) < 1e-5


class Attending(nn.Module):
    """Tied embeddings, a residual block with attention, an activation that is used twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids):
        x = self.embed(ids)
        y = self.norm(x)
        x = torch.relu(x + self.attention(y, y, y, need_weights=False)[0])
        return F.linear(x + x.sin(), self.embed.weight).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(7, 5), nn.LSTM(5, 4), nn.Linear(4, 7)

    def forward(self, ids):
        return self.out(self.lstm(self.embed(ids).transpose(0, 1))[0][-1])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.out = nn.Linear(36, 7)

    def forward(self, ids):
        x = F.one_hot(ids, 6).float().unsqueeze(1)
        x = F.max_pool2d(F.relu_(self.first(x)), 2)
        return self.out((x + F.gelu(self.second(x))).flatten(1))


@pytest.mark.parametrize("kind", [Attending, Recurrent, Pooled])
def test_a_step_overwrites_activations_and_nothing_else(kind):
    torch.manual_seed(0)
    model, weights = kind(), torch.ones(5)
    compiled = compiled_sum(model, losses, Flat(0.5))
    for _ in range(2):
        batch = torch.randint(0, 6, (5, 6)), torch.randint(0, 7, (5,))
        held = [t.clone() for t in (*batch, weights, *model.parameters())]
        wanted = clipped_sum(model, losses, batch, Flat(0.5))
        for _ in range(2):  # the second call would read what the first had overwritten
            assert relative(compiled(batch, weights), wanted) < 1e-5
        for now, before in zip((*batch, weights, *model.parameters()), held, strict=True):
            assert torch.equal(now, before)


def test_sizes_around_the_edge_of_a_chunk_share_a_trace(monkeypatch):
    monkeypatch.setitem(ghost_norm.CHUNK_ELEMENTS, "cpu", 8 * 6**2)  # eight examples at a time
    torch.manual_seed(0)
    model = Attending()
    compiled = compiled_sum(model, losses, Flat(0.5))
    for rows in (20, 15, 17, 24, 30):
        batch = torch.randint(0, 6, (rows, 6)), torch.randint(0, 7, (rows,))
        wanted = clipped_sum(model, losses, batch, Flat(0.5))
        assert relative(compiled(batch, torch.ones(rows)), wanted) < 1e-5
    (graphs,) = compiled._graphs.values()
    assert len(graphs.traces) == 1


def test_memory_that_two_tensors_share_is_not_given_away():
    x, y, z = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    assert _own([x, x[1:], y, z], [z.view(2, 2)]) == [2]
