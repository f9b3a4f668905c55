"""Python values of a traced program: never frozen in silence, written once a step, left clean."""

import collections
import functools
import gc
import itertools
import random
import statistics
import time
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from looped_reference import alone
from slow_cases import one_fast
from torch import nn
from torch.nn import functional as F

from tacit.errors import IncompatibleModel
from tacit.training import Flat, clipped_sum, make_private, torch_internals
from tacit.training.program.one_example import Untraceable
from tacit.training.program.programs import Programs
from tacit.training.program.python_state import PythonState
from tacit.training.program.tensor_values import Placeholder

GENERATOR = torch.Generator().manual_seed(0)
BATCH = torch.randn(6, 4, generator=GENERATOR), torch.randint(3, (6,), generator=GENERATOR)
SCALE = 1.0
SETTINGS = {"loss": {"scale": 1.0}}
SETTINGS_OF_RUN = {
    "batch_size": 3, "steps": 6, "clip_norm": 0.5, "noise_multiplier": 0.5, "seed": 1,
}  # fmt: skip


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *more, nn.Linear(5, 3))


def prepared(loss_fn, model=None, batch=BATCH):
    programs = Programs(network() if model is None else model, loss_fn)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        programs.prepare(batch)
    return programs, [str(w.message) for w in found]


def both_ways(model, loss_fn, batch=BATCH):
    return [way(model, loss_fn, batch, Flat(0.1)).sums for way in (clipped_sum, alone)]


def assert_equal_sums(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, check_dtype=False)


# Programs that are traced for each lot ------------------------------------------------------------


def mixup_by_numpy():
    return network(), lambda m, b: np.random.beta(1, 1) * ce(m, b)  # noqa: NPY002


def layer_drop(p):
    def build():
        return network(), lambda m, b: ce(m, b) * (1 if random.random() < p else 2)

    return build


def layer_drop_by_torch():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return x[:, :3] if torch.rand([]) < 0.5 else self.layer(x) + x[:, :3]

    return nn.Sequential(nn.Linear(4, 4), Dropped()), ce


def draws_of_its_own_generator():
    rng = np.random.default_rng(0)
    return network(), lambda m, b: ce(m, b) * rng.random()


def schedule_that_counts_calls():
    calls = [0]

    def loss_fn(m, b):
        calls[0] += 1
        return ce(m, b) * calls[0]

    return network(), loss_fn


def rare_schedule():
    class Scheduled(nn.Sequential):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (2 if self.calls > 100 else 1)

    return Scheduled(nn.Linear(4, 3)), ce


def clock():
    return network(), lambda m, b: ce(m, b) * time.perf_counter()


def hidden_counter():
    calls = itertools.count(1)  # Python cannot read it without advancing it
    return network(), lambda m, b: ce(m, b) * next(calls)


MOVING = {
    "mixup": (mixup_by_numpy, "numpy.random"),
    "layer drop .5": (layer_drop(0.5), "generator random"),
    "layer drop .05": (layer_drop(0.05), "generator random"),
    "layer drop by torch": (layer_drop_by_torch, "generator torch"),
    "own generator": (draws_of_its_own_generator, "rng of"),
    "schedule": (schedule_that_counts_calls, "calls of loss_fn"),
    "rare schedule": (rare_schedule, "model.calls"),
    "clock": (clock, "differ"),
    "hidden counter": (hidden_counter, "differ"),
}


@pytest.mark.parametrize("name", MOVING)
def test_a_program_that_moves_is_traced_for_each_lot_with_one_warning(name):
    build, text = MOVING[name]
    programs, warned = prepared(*build()[::-1])
    assert text in programs.moving
    assert len(warned) == 1
    assert programs.moving in warned[0]
    assert " s." in warned[0]
    for lot in range(1, 3):
        before = programs.program_of(BATCH)
        programs.begin_lot()  # warnings are errors: no second one
        assert programs.traces == lot
        assert programs.program_of(BATCH) is not before


@pytest.mark.parametrize("name", ["mixup", "own generator", "layer drop by torch"])
def test_numbers_are_fresh_and_generators_left_as_by_ordinary_code(name):
    model, loss_fn = MOVING[name][0]()
    start = seeds(3)
    programs, _ = prepared(loss_fn, model)
    assert states() == start
    codes = set()
    for _ in range(12):
        programs.begin_lot()
        codes.add(programs.program_of(BATCH).graph.code)
    assert len(codes) > 1
    assert states() != start or name == "own generator"


def seeds(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    return states()


def states():
    legacy = repr(np.random.get_state())  # noqa: NPY002
    return random.getstate(), legacy, bytes(torch.get_rng_state().numpy())


def test_the_engine_draws_what_ordinary_code_draws():
    model, loss_fn = mixup_by_numpy()
    with pytest.warns(RuntimeWarning, match=r"numpy\.random"):
        clipped_sum(model, loss_fn, BATCH, Flat(0.1))  # traced, then one lot
    for seed in range(3):
        seeds(seed)
        found = clipped_sum(model, loss_fn, BATCH, Flat(0.1)).sums
        after = states()
        seeds(seed)
        number = np.random.beta(1, 1)  # noqa: NPY002
        assert states() == after
        fixed = alone(model, lambda m, b, c=number: c * ce(m, b), BATCH, Flat(0.1))
        assert_equal_sums(found, fixed.sums)


def test_draws_for_each_row_do_not_trace():
    def spec_augment(m, b):
        mask = torch.ones_like(b[0])
        for row in mask:
            row[random.randrange(4)] = 0
        return ce(m, (b[0] * mask, b[1]))

    model, start = network(), seeds(0)
    with pytest.raises(Untraceable, match="each row"):
        Programs(model, spec_augment).prepare(BATCH)
    assert states() == start


# Values that change between lots ------------------------------------------------------------------


def change_global():
    global SCALE
    SCALE = SCALE + 1

    def put_back():
        global SCALE
        SCALE = 1.0

    return put_back


def closure_case():
    scale = 1.0

    def loss_fn(m, b):
        return scale * ce(m, b)

    def change():
        nonlocal scale
        scale = 2.0

    return network(), loss_fn, change, "scale of loss_fn"


def attribute_case():
    settings = types.SimpleNamespace(scale=1.0, steps=0)
    return (
        network(),
        lambda m, b: settings.scale * ce(m, b),
        lambda: setattr(settings, "scale", 2.0),
        ".scale",
    )


def method_case():
    class Training:
        scale = 1.0

        def loss(self, m, b):
            return self.scale * ce(m, b)

    training = Training()
    return network(), training.loss, lambda: setattr(Training, "scale", 2.0), "Training.scale"


def config_case():
    net = network()
    net.config = types.SimpleNamespace(scale=1.0)
    return (
        net,
        lambda m, b: m.config.scale * ce(m, b),
        lambda: setattr(net.config, "scale", 2.0),
        "model.config.scale",
    )


def item_case():
    net = network()
    net.register_buffer("scale", torch.tensor(1.0))
    return net, lambda m, b: m.scale.item() * ce(m, b), lambda: net.scale.fill_(2.0), "model.scale"


def changing(change, text, *more):
    def build():
        net = network(*more)
        return net, ce, functools.partial(change, net), text

    return build


CHANGES = {
    "global": lambda: (network(), lambda m, b: SCALE * ce(m, b), change_global, "global SCALE"),
    "nested dict": lambda: (
        network(),
        lambda m, b: SETTINGS["loss"]["scale"] * ce(m, b),
        lambda: SETTINGS["loss"].update(scale=SETTINGS["loss"]["scale"] + 1),
        "SETTINGS['loss']['scale']",
    ),
    "closure": closure_case,
    "attribute": attribute_case,
    "class": method_case,
    "config": config_case,
    "item of a buffer": item_case,
    "dropout rate": changing(lambda net: setattr(net[2], "p", 1.0), "model.2.p", nn.Dropout(0.0)),
    "mode": changing(lambda net: net.eval(), "training", nn.Dropout(1.0)),
    "hook": changing(
        lambda net: net[0].register_forward_hook(lambda m, i, o: 2 * o), "model.0._forward_hooks"
    ),
    "frozen weight": changing(lambda net: net[0].weight.requires_grad_(False), "requires_grad"),
    "layer": changing(lambda net: net.__setitem__(1, nn.ReLU()), "model.1"),
}


@pytest.mark.parametrize("name", one_fast(CHANGES, 2))
def test_a_changed_value_is_named_and_the_new_one_counts(name):
    model, loss_fn, change, text = CHANGES[name]()
    programs, warned = prepared(loss_fn, model)
    assert not warned
    programs.begin_lot()
    assert programs.traces == 0
    clipped_sum(model, loss_fn, BATCH, Flat(0.1))
    put_back = change()
    programs.begin_lot()
    assert any(text in changed for changed in programs.changed)
    assert programs.traces == 1
    programs.begin_lot()  # what stays is traced once, without a warning
    assert (programs.traces, programs.changed) == (1, [])
    assert_equal_sums(*both_ways(model, loss_fn))
    if name == "global":
        put_back()


def test_a_value_that_changes_at_each_step_is_traced_at_each_with_one_warning():
    scale = [1.0]
    programs, _ = prepared(lambda m, b: scale[0] * ce(m, b))
    scale[0] = 2.0
    programs.begin_lot()
    scale[0] = 3.0
    with pytest.warns(RuntimeWarning, match=r"scale of <lambda> changed.* s\."):
        programs.begin_lot()
    for traces in (3, 4):
        scale[0] += 1
        programs.begin_lot()
        assert programs.traces == traces


def test_counters_of_the_training_loop_beside_the_loss_are_no_change():
    class Training:
        def __init__(self):
            self.step, self.history, self.scale = 0, [], 1.0

        def loss(self, m, b):
            return ce(m, b) * self.scale

    training = Training()
    programs, warned = prepared(training.loss)
    for _ in range(3):
        training.step += 1
        training.history.append(training.step)
        programs.begin_lot()
    assert (programs.traces, warned) == (0, [])


def test_what_only_the_first_call_builds_moves_nothing():
    class Warms(nn.Linear):
        factors = ()

        def forward(self, x):
            for factor in self.factors:
                x = factor * x
            self.factors = [1.0]
            return super().forward(x)

    programs, warned = prepared(ce, Warms(4, 3))
    assert (programs.moving, warned) == ("", [])


def test_evaluation_between_lots_is_no_change():
    model = network(nn.Dropout(0.1))
    programs, _ = prepared(ce, model)
    model.eval()
    ce(model, BATCH).sum().backward()
    model.train()
    programs.begin_lot()
    assert programs.traces == 0


# What Python writes -------------------------------------------------------------------------------


def other_shape():
    return torch.zeros(2, 7, 4), torch.zeros(2, dtype=torch.long)


def test_counters_and_lists_advance_once_in_a_lot_whatever_shapes_it_has():
    calls, log = collections.Counter(), []

    class Counts(nn.Sequential):
        def forward(self, x):
            calls["forward"] += 1
            self.calls = getattr(self, "calls", 0) + 1
            log.append(self.calls)
            return super().forward(x).flatten(1, -2).mean(1) if x.dim() > 2 else super().forward(x)

    model = Counts(nn.Linear(4, 3))
    programs, _ = prepared(ce, model)
    programs.prepare(other_shape())
    assert (calls, log, hasattr(model, "calls")) == ({}, [], False)
    for lot in range(1, 4):
        programs.begin_lot()
        for batch in (BATCH, other_shape(), BATCH):
            programs.program_of(batch)
        assert (calls["forward"], log, model.calls) == (lot, list(range(1, lot + 1)), lot)


def test_counters_advance_once_in_a_call_of_the_engine():
    model, loss_fn = schedule_that_counts_calls()
    with pytest.warns(RuntimeWarning, match="calls"):
        found = [clipped_sum(model, loss_fn, BATCH, Flat(9.9)) for _ in range(3)]
    for number, each in enumerate(found, 1):
        expected = clipped_sum(model, lambda m, b, c=number: c * ce(m, b), BATCH, Flat(9.9))
        assert_equal_sums(each.sums, expected.sums)


def trained(loss_fn, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = make_private(model, optimizer, BATCH, loss_fn, **(SETTINGS_OF_RUN | options))
    for lot in private:
        private.step(lot)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_private_run_counts_its_steps_and_draws_from_its_seed():
    calls, drawn = [0], []

    def loss_fn(m, b):
        calls[0] += 1
        drawn.append(random.random() + np.random.rand())  # noqa: NPY002
        return ce(m, b) * drawn[-1] * calls[0]

    weights = []
    for seed in (1, 2):
        calls[0] = 0
        drawn.clear()
        start = seeds(seed)
        weights.append(trained(loss_fn))
        assert calls == [6]
        assert len(set(drawn)) == 6
        assert states()[:2] == start[:2]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


class Keeps(nn.Module):
    """Stores what it computes in many places, and reads none of it."""

    log: list = []  # noqa: RUF012  # a class that is written badly

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.last, self.losses, self.by_name = None, [], {"kept": 1}
        self.average, self.mask, self.seen = 0.0, None, set()

    def forward(self, x):
        self.last = self.layer(x)
        self.by_name["last"] = [self.last]
        self.new = types.SimpleNamespace(out=(self.last,))
        out = self.last
        self.later = lambda: out
        self.losses.append(self.last.sum().item())
        Keeps.log.append(self.last.tolist())
        self.average = 0.9 * self.average + 0.1 * self.last.mean().item()
        if self.mask is None:
            self.mask = torch.ones(3)
        self.seen.add(x)
        return self.last * self.mask * cached(3)


@functools.cache
def cached(n):
    return torch.ones(n)


def reachable(*roots):
    """Return all objects from `roots` on, but for modules, classes of libraries and frames."""
    pending, seen = list(roots), {}
    while pending:
        value = pending.pop()
        is_own = not isinstance(value, type) or value.__module__ == __name__
        if id(value) in seen or isinstance(value, types.ModuleType) or not is_own:
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType) and value.__module__ != __name__:
            pending += [value.__closure__, value.__defaults__]
        else:
            pending += gc.get_referents(value)
    return list(seen.values())


@pytest.mark.parametrize("moves", [False, True])
def test_no_tensor_of_a_trace_stays_in_the_program(moves):
    model, calls = Keeps(), [0]

    def loss_fn(m, b):
        calls[0] += moves
        print(f"{ce(m, b).sum().item():.1f}")
        return ce(m, b)

    cached(3)
    before = {k: v for k, v in vars(model).items() if k != "log"}
    programs, warned = prepared(loss_fn, model)
    programs.begin_lot()
    programs.program_of(BATCH)
    assert bool(warned) == moves
    assert calls == [int(moves)]
    for value in reachable(loss_fn, model):
        assert not torch_internals.is_fake(value)
        assert not isinstance(value, Placeholder)
    assert vars(model) == before
    assert model.by_name == {"kept": 1}
    assert model.losses == Keeps.log == []


def test_what_one_call_leaves_for_the_next_is_refused():
    class Carries(nn.Linear):
        state = None

        def forward(self, x):
            out = super().forward(x)
            if self.state is not None:
                out = out + self.state
            self.state = out.detach().mean(0)
            return out

    class RunningMean(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            out = super().forward(x)
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            return out - self.mean

    for model, name in ((Carries(4, 3), "model.state"), (RunningMean(), "model.mean")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(IncompatibleModel, match=name):
            make_private(model, optimizer, BATCH, ce, **SETTINGS_OF_RUN)


# Values of tensors --------------------------------------------------------------------------------


def average_of_losses():
    average = [0.0]

    def loss_fn(m, b):
        losses = ce(m, b)
        average[0] = 0.9 * average[0] + 0.1 * losses.mean().item()
        return losses * average[0]

    return loss_fn


def in_a_library_function(m, b):
    return ce(m, b) + F.one_hot(b[1], int(b[1].max()) + 1).sum()


ASKING = {
    "item in a condition": lambda m, b: ce(m, b) * (2 if b[0].sum().item() > 10 else 1),
    "item as a truth value": lambda m, b: ce(m, b) if b[0].sum().item() else 2 * ce(m, b),
    "float": lambda m, b: ce(m, b) * (2 if float(b[0].sum()) > 10 else 1),
    "int": lambda m, b: ce(m, b) * int(b[0].sum()),
    "bool": lambda m, b: ce(m, b) if (b[0] > 0).any() else 2 * ce(m, b),
    "tolist": lambda m, b: ce(m, b) * max(b[0].flatten().tolist()),
    "item in arithmetic": lambda m, b: ce(m, b) * (1 + b[0].sum().item()),
    "item through numpy": lambda m, b: ce(m, b) * float(np.sqrt(b[0].sum().item())),
    "rows chosen by value": lambda m, b: ce(m, b) + b[0][b[0] > 0].sum(),
    "numpy": lambda m, b: ce(m, b) * float(b[0].numpy().sum()),
    "kept for the next call": average_of_losses(),
    "in a function of torch": in_a_library_function,
}


@pytest.mark.parametrize("name", ASKING)
def test_a_value_that_a_program_needs_is_refused_at_its_line(name):
    model, start = network(), seeds(0)
    with pytest.raises(Untraceable, match=r"test_python_state\.py:[0-9]+ ") as found:
        Programs(model, ASKING[name]).prepare(BATCH)
    assert "ce(m, b)" in found.value.reason or "losses" in found.value.reason
    assert states() == start


def test_a_write_into_a_buffer_is_refused_by_name():
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            return super().forward(x)

    with pytest.raises(IncompatibleModel, match=r"writes into model\.steps"):
        Programs(Counts(), ce).prepare(BATCH)


# Tensors from outside -----------------------------------------------------------------------------


def test_a_tensor_from_outside_is_held_fixed():
    masks = [torch.ones(3)]
    programs, _ = prepared(lambda m, b: ce(m, b) * masks[0].sum())
    programs.begin_lot()
    masks[0].mul_(2)
    with pytest.raises(IncompatibleModel, match=r"masks of <lambda>.*register_buffer"):
        programs.begin_lot()


def test_buffers_and_parameters_are_read_at_each_step():
    model = network()
    model.register_buffer("scale", torch.tensor(1.0))
    loss_fn = lambda m, b: m.scale * ce(m, b)  # noqa: E731
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.scale.fill_(value)
            model[0].weight.mul_(value)
        assert_equal_sums(*both_ways(model, loss_fn))


def test_memory_of_the_data_set_is_refused():
    for used in (BATCH[0], BATCH[0][2], BATCH[0].flatten()[3:5]):
        programs = Programs(network(), lambda m, b, t=used: ce(m, b) + t.sum(), private=BATCH)
        with pytest.raises(IncompatibleModel, match="memory of the data set"):
            programs.prepare(BATCH)
    model = network()
    model.register_buffer("records", BATCH[0])
    programs = Programs(model, lambda m, b: ce(m, b) + m.records.sum(), private=BATCH)
    with pytest.raises(IncompatibleModel, match=r"model\.records"):
        programs.prepare(BATCH)
    Programs(network(), ce, private=BATCH).prepare(BATCH)


def test_a_parameter_of_no_model_is_refused():
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(IncompatibleModel, match=r"weight of .*no parameter"):
        Programs(network(), lambda m, b: ce(m, b) * weight.sum()).prepare(BATCH)


# Real models, costs, memory -----------------------------------------------------------------------


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip

    def loss_fn(m, b):
        scores = m(input_ids=b[0]).logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(scores, b[0][:, 1:], reduction="none").mean(1)

    return transformers.GPT2LMHeadModel(config), loss_fn, (torch.randint(32, (8, 16)),)


def vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=4, num_labels=3,
    )  # fmt: skip
    batch = torch.randn(8, 3, 16, 16), torch.randint(3, (8,))
    return transformers.ViTForImageClassification(config), lambda m, b: classes(m, b), batch


def classes(m, b):
    return F.cross_entropy(m(b[0]).logits, b[1], reduction="none")


@pytest.mark.parametrize("build", [lambda: (network(), ce, BATCH), gpt2, vit])
def test_ordinary_training_raises_no_alarm_and_costs_little(build):
    model, loss_fn, batch = build()
    optimizer = torch.optim.AdamW(model.parameters())
    programs, warned = prepared(loss_fn, model, batch)

    def step():
        loss_fn(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def compare():
        for _ in range(20):
            programs.begin_lot()

    times = collections.defaultdict(list)
    for _ in range(7):
        for run in (step, compare):
            start = time.process_time()
            run()
            times[run].append(time.process_time() - start)
        model.eval()
        with torch.no_grad():
            loss_fn(model, batch)
        model.train()
    assert (programs.traces, programs.moving, warned) == (0, "", [])
    cost = statistics.median(times[compare]) / 20
    assert cost <= max(50e-6, 0.01 * statistics.median(times[step])) * 2  # 2: other processes


def test_layer_drop_of_transformers_is_drawn_at_each_step():
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        vocab_size=32, hidden_size=16, word_embed_proj_dim=16, num_hidden_layers=3, ffn_dim=16,
        num_attention_heads=2, max_position_embeddings=16, layerdrop=0.5, dropout=0.0,
    )  # fmt: skip
    _, loss_fn, batch = gpt2()
    programs, warned = prepared(loss_fn, transformers.OPTForCausalLM(config), batch)
    assert "torch" in programs.moving
    assert len(warned) == 1
    seeds(0)
    sizes = set()
    for _ in range(8):
        programs.begin_lot()
        sizes.add(len(programs.program_of(batch).graph.graph.nodes))
    assert len(sizes) > 1


def test_programs_of_direct_calls_are_not_kept_for_ever():
    held = []
    for _ in range(3):
        model = network()
        loss_fn = functools.partial(lambda own, m, b: ce(own, b), model)
        clipped_sum(model, loss_fn, BATCH, Flat(1.0))
        held.append(weakref.ref(model))
    del model, loss_fn
    gc.collect()
    assert [each() is None for each in held] == [True, True, False]


def test_state_is_put_back_in_every_container():
    state = [1, {"a": {2}}, collections.deque([3], 4), np.arange(3)]
    rng = random.Random(0)

    def program():
        state[1]["a"].add(rng.random())
        state[1]["b"] = 1
        state[2].append(1)
        state[3][0] = 7
        state.append(1)

    found = PythonState(program, network())
    before, start = found.now(), rng.getstate()
    assert found.is_same(before)
    program()
    assert not found.is_same(before)
    assert found.drawn(before) == ["rng of program"]
    found.put_back(before)
    assert found.is_same(before)
    assert (state[:2], list(state[2]), state[3][0]) == ([1, {"a": {2}}], [3], 0)
    assert rng.getstate() == start
