"""Examples that influence each other are refused; programs that keep them apart are not."""

import functools
import re
import warnings

import numpy as np
import pytest
import torch
from clean_programs import PROGRAMS
from mixing_cases import RECORDS, Case, ce, data, model
from random_mixing_cases import CASES
from slow_cases import one_fast
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.errors import IncompatibleModel
from tacit.sampling import FixedSize
from tacit.training import Flat, strict_cost
from tacit.training.altered_lots import AlteredLots
from tacit.training.isolation import CheckedIsolation, chance_of_missing
from tacit.training.program_state import ProgramState
from tacit.training.records import Records

MOST = [name for name, build in CASES.items() if build().reach == "most"]
RARE = [name for name, build in CASES.items() if build().reach == "few"]
LATE = [name for name, build in CASES.items() if build().reach == "late"]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # slow engines, batching fallbacks
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, by forward derivatives
        yield


def private(case: Case, *, seed: int, steps: int = 2, **options):
    optimizer = torch.optim.SGD(case.model.parameters(), lr=options.pop("lr", 0.0))
    return tacit.make_private(
        case.model, optimizer, case.dataset, case.loss_fn,
        batch_size=options.pop("batch_size", 64), steps=steps,
        clip_norm=1.0, noise_multiplier=options.pop("noise_multiplier", 1.0), seed=seed,
        collate_fn=case.collate_fn, augment=case.augment, **with_speed(options),
    )  # fmt: skip


def train(run) -> None:
    for lot in run:
        run.step(lot)


def is_refused_before_release(name: str, seed: int) -> bool:
    try:
        private(CASES[name](), seed=seed)
    except IncompatibleModel:
        return True
    return False


@pytest.mark.parametrize("name", one_fast(MOST, 9))
def test_mixing_of_most_rows_is_refused_before_the_first_release(name):
    assert is_refused_before_release(name, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_mixing_of_most_rows_is_refused_on_fifty_seeds(name):
    assert all(is_refused_before_release(name, seed) for seed in range(50))


SIZES = {
    "drawn by a sampler of fixed size": (64, {"sampler": FixedSize(64, RECORDS)}),
    "of a microbatch": (16, {"max_microbatch": 16}),
    "of a padded lot": (80, {"static_shapes": True}),
}


@pytest.mark.parametrize("name", SIZES)
def test_mixing_at_the_sizes_that_the_program_will_see_is_refused(name):
    """Lots of 64 expected records; no other size mixes."""
    size, options = SIZES[name]

    def loss_fn(m, batch):
        x, y = batch
        return ce(m(x - x.mean(0) if len(x) == size else x), y)

    for seed in range(3):
        with pytest.raises(IncompatibleModel, match="so no example can be clipped alone"):
            private(Case(model(), loss_fn, data(), "most"), seed=seed, **options)


def is_refused_within(name: str, seed: int, steps: int) -> bool:
    try:
        train(private(CASES[name](), seed=seed, steps=steps, lr=0.01))
    except IncompatibleModel:
        return True
    return False


def stated_chance(seed: int, steps: int, *, share: float, is_late: bool) -> float:
    """Return the stated chance to find mixing; the key, not the program, decides on the tests."""
    run = private(PROGRAMS["plain"](), seed=seed, steps=steps)
    before = run._isolation.halves if is_late else 0
    train(run)
    return 1 - chance_of_missing(share, run._isolation.halves - before)


@pytest.fixture(scope="module")
def stated():
    return functools.lru_cache(stated_chance)


SHOWN_BY_GRADIENTS_ALONE = ["gradients_are_centered_late"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RARE, *LATE])
def test_rare_and_late_mixing_is_refused_as_often_as_stated(name, stated):
    steps, seeds, case = 600, range(12), CASES[name]()
    if name in SHOWN_BY_GRADIENTS_ALONE:  # one test in eight compares gradients
        least = np.full(len(seeds), 1 - (1 - 1 / 8) ** (steps / 80 - 1))
    else:
        late = case.reach == "late"
        least = np.array([stated(s, steps, share=case.share, is_late=late) for s in seeds])
    refused = sum(is_refused_within(name, seed, steps) for seed in seeds)
    print(f"{name}: refused {refused} of {len(seeds)}, stated {least.mean():.2f}")
    assert refused >= least.sum() - 3 * np.sqrt((least * (1 - least)).sum())


def test_late_mixing_voids_the_run():
    case = CASES["mixing_begins_after_some_calls"]()
    run = private(case, seed=0, steps=400)
    with pytest.raises(IncompatibleModel, match="not covered by its guarantee"):
        train(run)
    assert run.steps_taken > 0
    assert "no guarantee" in run.isolation
    assert run.epsilon(delta=1e-5) == np.inf
    with pytest.raises(IncompatibleModel, match="Begin a new run"):
        run.state_dict()
    with pytest.raises(IncompatibleModel):
        run.step(run._lots.lot(run.steps_taken))


@pytest.mark.parametrize("name", one_fast(PROGRAMS, 12))
def test_programs_that_keep_examples_apart_are_accepted(name):
    run = private(PROGRAMS[name](), seed=0, steps=3)
    for lot in run:
        run.step(lot)
    assert run.isolation.startswith("tested, ")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_keep_examples_apart_are_accepted_on_twenty_seeds(name):
    for seed in range(20):
        run = private(PROGRAMS[name](), seed=seed, steps=3)
        for lot in run:
            run.step(lot)


# By construction ----------------------------------------------------------------------------------


def sum_of(case: Case, records: np.ndarray, seed: int) -> torch.Tensor | None:
    """The clipped sum that a strict run releases at its second step; None if it is refused."""
    subset = torch.utils.data.Subset(_records(case.dataset), records.tolist())
    run = private(
        Case(case.model, case.loss_fn, subset, case.reach, case.collate_fn, case.augment),
        seed=seed, noise_multiplier=0.0, isolation="strict", batch_size=len(records),
    )  # fmt: skip
    for lot in run:
        run.step(lot)
    parameters = [p for p in case.model.parameters() if p.requires_grad]
    return torch.cat([p.grad.flatten() for p in parameters]) * len(records)


def _records(dataset):
    return torch.utils.data.TensorDataset(*dataset) if isinstance(dataset, tuple) else dataset


@pytest.mark.parametrize("name", one_fast(CASES, 40))
def test_strict_bounds_what_one_record_moves(name):
    rows = np.arange(10)
    try:
        base, other = (sum_of(CASES[name](), rows, seed) for seed in (0, 1))
        added = sum_of(CASES[name](), np.append(rows, 99), 0)
        replaced = sum_of(CASES[name](), np.where(rows == 5, 101, rows), 0)
    except IncompatibleModel:
        return  # refused: nothing is released
    # A program that draws random numbers draws others for a longer lot: only laws can be compared.
    if torch.equal(base, other):
        assert float((added - base).norm()) <= 1 + 1e-5
    assert float((replaced - base).norm()) <= 2 + 1e-5


UNTRACED = (
    "experts_chosen_for_each_row", "only_chosen_experts", "equal_rows_computed_once",  # shapes
    "masked_padding", "masked_attention", "packed_sequences",  # records of several lengths
    "draws_that_depend_on_the_record", "numbers_of_the_operating_system",  # values are read
    "noise_from_a_generator_that_cannot_be_put_back",
    "noise_from_numpy", "spans_masked_by_python_randomness", "noise_with_heavy_tails",  # random
    "one_random_scale_for_the_whole_lot", "crops_of_random_length",  # numbers, but not torch's
    "a_schedule_that_cannot_be_put_back", "a_data_set_with_a_cache_in_files",  # it writes files
)  # fmt: skip
STRICT = [n for n in PROGRAMS if not n.startswith(UNTRACED)]


@pytest.mark.parametrize("name", one_fast(STRICT, 15))
def test_strict_takes_programs_without_control_flow(name):
    run = private(PROGRAMS[name](), seed=0, isolation="strict", batch_size=8)
    for lot in run:
        run.step(lot)
    assert run.isolation == "by construction"


def test_strict_and_checked_release_the_same_sum():
    grads = []
    for kind in ("strict", "checked"):
        case = PROGRAMS["plain"]()
        run = private(case, seed=3, noise_multiplier=0.0, isolation=kind)
        for lot in run:
            run.step(lot)
        grads.append(torch.cat([p.grad.flatten() for p in case.model.parameters()]))
    assert torch.allclose(*grads, atol=1e-6)


def test_strict_prints_its_cost_once_for_a_program(capsys, monkeypatch):
    monkeypatch.setattr(strict_cost, "_MEASURED", set())
    private(PROGRAMS["plain"](), seed=0, isolation="strict")
    assert re.search(r"takes \d+\.\d times as long", capsys.readouterr().err)
    private(PROGRAMS["plain"](), seed=1, isolation="strict")
    assert not capsys.readouterr().err


def test_strict_refuses_before_the_run_what_cannot_be_traced():
    with pytest.raises(IncompatibleModel, match="isolation='strict'"):
        private(PROGRAMS["experts_chosen_for_each_row"](), seed=0, isolation="strict")


def test_strict_needs_its_own_step_and_engine():
    case = PROGRAMS["plain"]()
    with pytest.raises(ValueError, match="engine"):
        private(case, seed=0, isolation="strict", engine="loop")
    with pytest.raises(ValueError, match="isolation must be"):
        private(case, seed=0, isolation="loose")


# The pieces ---------------------------------------------------------------------------------------


def test_the_chance_of_missing_follows_from_what_was_tested():
    untested = private(PROGRAMS["plain"](), seed=0, check=False)
    assert untested.isolation == "not tested"
    assert untested.chance_of_missing(1.0) == 1.0
    strict = private(PROGRAMS["plain"](), seed=0, isolation="strict")
    assert strict.chance_of_missing(0.1) == 0.0
    tested = private(PROGRAMS["plain"](), seed=0)
    assert tested.chance_of_missing(1.0) == chance_of_missing(1.0, tested._isolation.halves)
    assert tested.chance_of_missing(1.0) < tested.chance_of_missing(0.1) < 1.0


def test_the_stated_chance_of_missing_holds():
    """A pair of rows that mixes in every lot: a check separates it at least once in four."""
    case = Case(model(), lambda m, b: pair_loss(m, *b), data(), "few")
    records = Records(case.dataset, collate_fn=None, device=torch.device("cpu"))
    found, trials = 0, 120
    for seed in range(trials):
        tests = CheckedIsolation(case.model, case.loss_fn, records, Flat(1.0))
        try:
            rng = np.random.default_rng(seed)
            AlteredLots(tests, np.arange(16), rng).replace()
        except IncompatibleModel:
            found += 1
    assert found / trials >= (1 - chance_of_missing(1.0, 1)) - 3 * np.sqrt(0.25 * 0.75 / trials)


def pair_loss(m, x, y):
    seen = torch.zeros_like(x)
    seen[3 % len(x)] = x[11 % len(x)]
    return ce(m(x + seen), y)


def test_state_is_found_and_restored_wherever_it_is():
    class Holder:
        total = 0

        def __init__(self):
            self.items, self.array = [1], np.zeros(3)

    holder, table, generator = Holder(), {"a": [1, 2]}, np.random.default_rng(0)
    tensor, cell = torch.zeros(2), 5

    def program():
        nonlocal cell
        Holder.total += 1
        holder.items.append(2)
        holder.array += 1
        table["a"].append(3)
        table["b"] = 1
        tensor.add_(1)
        cell += 1
        return generator.random()

    state = ProgramState(program)
    first = program()
    state.restore()
    assert (Holder.total, holder.items, table, cell) == (0, [1], {"a": [1, 2]}, 5)
    assert not holder.array.any()
    assert not tensor.any()
    assert program() == first


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.sign()

    @staticmethod
    def backward(ctx, g):
        return g


def test_a_weight_behind_a_custom_function_keeps_its_gradient():
    """A rule that detaches a weight it did not record would return zero for it."""

    class Straight(nn.Linear):
        def forward(self, x):
            return F.linear(x, Sign.apply(self.weight), self.bias)

    net = nn.Sequential(Straight(6, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = data()
    sums = {}
    for engine in ("auto", "loop"):
        sums[engine] = tacit.training.clipped_sum(
            net, lambda m, b: ce(m(b[0]), b[1]), (x[:8], y[:8]), Flat(1.0), engine=engine
        ).sums["0.weight"]
    assert sums["loop"].norm() > 0.1
    assert torch.allclose(sums["auto"], sums["loop"], atol=1e-5)


def test_ranks_of_one_key_check_at_the_same_steps():
    case = PROGRAMS["plain"]()
    steps = {private(case, seed=7, steps=300)._isolation.next_check for _ in range(2)}
    assert len(steps) == 1


class _MeanOfTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.dropout = nn.Embedding(50, 8), nn.Dropout(0.3)
        self.out = nn.Linear(8, 2)

    def forward(self, tokens):
        return self.out(self.dropout(self.table(tokens).mean(1)))


@pytest.mark.parametrize("seed", range(4))
def test_padding_that_a_pooled_mean_sees_is_refused_with_dropout_too(seed):
    """A row alone gets other dropout masks than in its lot, so it is compared without dropout."""
    texts = [(torch.arange(3 + 7 * i % 13) % 49 + 1, torch.tensor(i % 2)) for i in range(200)]

    def padded(items):
        longest = max(len(tokens) for tokens, _ in items)
        rows = [F.pad(tokens, (0, longest - len(tokens))) for tokens, _ in items]
        return torch.stack(rows), torch.stack([label for _, label in items])

    def losses(net, batch):
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    torch.manual_seed(seed)
    net = _MeanOfTokens()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"batch_size": 20, "steps": 50, "clip_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(IncompatibleModel, match="alone"):
        tacit.make_private(net, optimizer, texts, losses, collate_fn=padded, seed=seed, **options)
    assert net.training


def test_gradients_by_torch_func_are_no_reason_to_refuse():
    def losses(net, batch):
        x, y = batch
        slopes = torch.func.vmap(torch.func.grad(lambda row: net(row).square().sum()))(x)
        return F.cross_entropy(net(x), y, reduction="none") + slopes.square().sum(1)

    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.randn(60, 6), torch.randint(0, 2, (60,))
    options = {"batch_size": 10, "steps": 2, "clip_norm": 1.0, "noise_multiplier": 1.0}
    run = tacit.make_private(net, optimizer, data, losses, **options)
    for lot in run:
        run.step(lot)
    assert run.steps_taken == 2


# The engine of the run ----------------------------------------------------------------------------


def mixed_one_row_at_a_time(m, batch):
    """Add the mean of the rows so far, if the rows come one by one, as in a loop."""
    x, y = batch
    if len(x) == 1:
        before, m.seen = getattr(m, "seen", x), x.detach()
        x = x + before
    return ce(m(x), y)


def mixed_under_vmap(m, batch):
    """Add the mean of all rows, which a function that is mapped over them should not see."""
    x, y = batch
    whole, functorch = x, torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(whole):
        whole = functorch.get_unwrapped(whole)
    return ce(m(x if whole is x else x - whole.mean(0)), y)


BY_ENGINE = {"loop": mixed_one_row_at_a_time, "vmap": mixed_under_vmap}


@pytest.mark.parametrize("engine", BY_ENGINE)
def test_a_program_that_mixes_under_one_engine_is_tested_with_it(engine):
    for seed in range(3):
        with pytest.raises(IncompatibleModel):
            private(Case(model(), BY_ENGINE[engine], data(), "most"), seed=seed, engine=engine)


@pytest.mark.parametrize("engine", ["bookkeeping", *BY_ENGINE])
@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_programs_that_keep_examples_apart_are_accepted_with_every_engine(engine, name):
    run = private(PROGRAMS[name](), seed=0, engine=engine, batch_size=16)
    train(run)
    assert run.isolation.startswith("tested, ")


def test_a_lot_counts_once_in_the_chance_of_missing():
    """Mixing in some lots only is missed by all tests of the others."""
    run = private(PROGRAMS["plain"](), seed=0)
    assert run.chance_of_missing(0.5) == chance_of_missing(0.5, 16)
