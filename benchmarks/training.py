"""The cost of a private step beside the ordinary one, Opacus and JAX Privacy.

    pip install -c constraints.txt -e '.[torch]' -r benchmarks/requirements-training.txt
    python benchmarks/training.py [--workloads cnn-256 mlp] [--methods plain tacit]
    python benchmarks/training.py --one-thread [--workloads table-50k]

Every pair of workload and method runs in a process of its own, back to back, on the same device:
a GPU if there is one, else the CPU. A step is the whole step: forward, clipping, noise, optimizer.
Time is the median over steps, memory the peak above the model's own at rest. fastDP has no release
to install, so it is not here. Where a method fails, the reason is printed in its place.

`--one-thread` compares on one thread of a CPU, in processor time: in one process for each row of
the table that it prints, the plain step, the private step and a release of as many numbers take
turns, with the compiled loop for noise and without it.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from _results import table, write

PACKAGES = ("tacit", "torch", "opacus", "jax", "jax-privacy", "numpy")
METHODS = (
    "plain", "plain-loader", "plain-compiled", "plain-graph",
    "tacit", "tacit-defaults", "tacit-compiled", "tacit-poisson-compiled", "tacit-backward",
    "tacit-backward-compiled",
    "opacus", "opacus-ghost", "jax-plain", "jax-privacy",
)  # fmt: skip
ONE_THREAD = (
    ("table-50k", "SGD"), ("table-50k", "momentum"), ("table-50k", "Adam"),
    ("table-1m", "SGD"), ("table-1m", "momentum"), ("table-1m", "Adam"),
    ("lstm", "momentum"), ("mlp", "momentum"), ("logistic", "momentum"),
)  # fmt: skip
ON_CPU = {"cnn-2048": 256, "wrn-16-4": 16, "gpt2": 1, "gpt2-lora": 1}  # batches a CPU can do
DEFAULT_SAMPLER = ("tacit-defaults", "tacit-poisson-compiled", "tacit-backward-compiled")
SIGMA, CLIP = 1.0, 1.0


class Measured(NamedTuple):
    """Median seconds of a step, peak bytes above rest, seconds until the first step ended.

    `mean` is the mean over all steps, and `before` the peak until the timed steps begin, with the
    comparison before the first step.
    """

    seconds: float
    peak: float
    first: float = 0.0
    mean: float = 0.0
    before: float = 0.0


def main() -> None:
    """Run the grid in processes and write results/training-<device>.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="*")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "METHOD"))
    parser.add_argument("--limit", type=float, default=300, help="seconds for one process")
    parser.add_argument("--one-thread", action="store_true")
    parser.add_argument("--turns", nargs=3, metavar=("WORKLOAD", "OPTIMIZER", "NOISE"))
    parser.add_argument("--processes", type=int, default=1, help="of each pair; the fastest counts")
    parser.add_argument(
        "--at-once", type=int, default=1, help="processes that compile at the same time"
    )
    arguments = parser.parse_args()
    if arguments.one:
        print("MEASURED", json.dumps(measure(*arguments.one)._asdict()))
        return
    if arguments.turns:
        print("MEASURED", json.dumps(take_turns(*arguments.turns)))
        return
    if arguments.one_thread:
        print(on_one_thread(arguments.workloads))
        return
    from _models import WORKLOADS

    chosen = arguments.workloads or list(WORKLOADS)
    pairs = [(w, m) for w in chosen for m in arguments.methods] * arguments.processes
    found: dict[tuple[str, str], Measured | str] = {}
    for start in range(0, len(pairs), arguments.at_once):
        for pair, result in in_turn(pairs[start : start + arguments.at_once], arguments.limit):
            before = found.get(pair, result)
            # The fastest: some processes are slowed by the addresses of their memory.
            both = isinstance(before, Measured) and isinstance(result, Measured)
            found[pair] = min(before, result) if both else before  # type: ignore[type-var]  # both are measured
            print(*pair, result, flush=True)
            report(found, chosen, arguments, is_final=False)
    report(found, chosen, arguments, is_final=True)


def report(
    found: dict[tuple[str, str], Measured | str],
    chosen: list[str],
    arguments: argparse.Namespace,
    *,
    is_final: bool,
) -> None:
    """Write what is known so far to results/training-<device>.md."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    missing = {
        (w, m): "not reached" for w in chosen for m in arguments.methods if (w, m) not in found
    }
    found = found | missing
    failures = [f"{w}, {m}: {r}" for (w, m), r in found.items() if isinstance(r, str)]
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    write(
        f"training-{kind}",
        f"A private step beside the ordinary one, on {device}",
        PACKAGES,
        f"{torch.get_num_threads()} threads; the fastest of {arguments.processes} processes for "
        "each pair. Ratios are to the plain step of the same kind: compiled to compiled, JAX to "
        "JAX.",
        "## Milliseconds a step (ratio)",
        block(found, chosen, arguments.methods, "seconds", 1e3),
        "## Time over the eager plain step",
        over_eager(found, chosen, arguments.methods),
        "## Peak MiB above rest (ratio)",
        block(found, chosen, arguments.methods, "peak", 2.0**-20),
        "## Peak MiB until the timed steps, with the comparison before the first step",
        block(found, chosen, arguments.methods, "before", 2.0**-20),
        "## Mean milliseconds of all steps",
        block(found, chosen, arguments.methods, "mean", 1e3),
        "## Seconds until the first step ended, all processes of a group compiling at once",
        block(found, chosen, arguments.methods, "first", 1.0),
        "## Failures",
        "\n".join(f"- {line}" for line in failures) or "none",
        is_final=is_final,
    )


def block(
    found: dict[tuple[str, str], Measured | str],
    workloads: list[str],
    methods: list[str],
    field: str,
    unit: float,
) -> str:
    rows = []
    for workload in workloads:
        row = [workload]
        for method in methods:
            result, base = found[workload, method], found.get((workload, twin_of(method)))
            if isinstance(result, str):
                row.append("–")
                continue
            value = getattr(result, field)
            text = f"{unit * value:.3g}"
            if isinstance(base, Measured) and base is not result and getattr(base, field) > 0:
                text += f" ({value / getattr(base, field):.2f}x)"
            row.append(text)
        rows.append(row)
    return table(["workload", *methods], rows)


def over_eager(
    found: dict[tuple[str, str], Measured | str], workloads: list[str], methods: list[str]
) -> str:
    rows = []
    for workload in workloads:
        base, row = found.get((workload, "plain")), [workload]
        for method in methods:
            result = found[workload, method]
            both = isinstance(result, Measured) and isinstance(base, Measured)
            row.append(f"{result.seconds / base.seconds:.2f}x" if both else "–")  # type: ignore[union-attr]  # both are measured
        rows.append(row)
    return table(["workload", *methods], rows)


def twin_of(method: str) -> str:
    """Return the non-private method that a method is compared with."""
    if method.startswith("jax"):
        return "jax-plain"
    if method == "tacit-defaults":
        return "plain-loader"
    if method.endswith("compiled"):  # on a GPU, compile=True replays CUDA graphs
        return "plain-graph" if is_gpu() else "plain-compiled"
    return "plain"


def on_one_thread(workloads: list[str] | None) -> str:
    """Return a table of times on one thread, in processor time; each row has a process."""
    rows = []
    for workload, optimizer in ONE_THREAD:
        if workloads and workload not in workloads:
            continue
        for is_compiled in (True, False):
            noise = "compiled" if is_compiled else "numpy"
            command = [sys.executable, __file__, "--turns", workload, optimizer, noise]
            settings = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
            times = json.loads(done.stdout.split("MEASURED ")[1])
            row = [workload, optimizer, noise]
            row += [
                f"{1e3 * statistics.median(times[name]):.3g} ({1e3 * min(times[name]):.3g})"
                for name in ("plain", "private", "noise")
            ]
            for others in (("plain",), ("plain", "noise")):
                turns = zip(times["private"], *(times[name] for name in others), strict=True)
                row.append(f"{statistics.median(first / sum(rest) for first, *rest in turns):.2f}")
            rows.append(row)
            print(*row, flush=True)
    names = ["workload", "optimizer", "noise by", "plain ms, median (least)", "private"]
    return table([*names, "noise alone", "private / plain", "private / (plain + noise)"], rows)


def take_turns(
    workload: str, optimizer: str, noise: str, seconds: float = 6.0
) -> dict[str, list[float]]:
    """Return processor seconds of plain steps, private steps and releases of noise, in turn.

    With noise "numpy", the package of the compiled loop counts as not installed.
    """
    if noise == "numpy":
        sys.modules["llvmlite"] = None  # type: ignore[assignment]  # so says Python's manual
    import torch
    from _models import WORKLOADS

    from tacit.training.key import Key
    from tacit.training.noise import NoisyMean

    torch.set_num_threads(1)
    work, size = WORKLOADS[workload], WORKLOADS[workload].batch_size
    data = work.batch(2 * size, torch.device("cpu"))
    make = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    }[optimizer]
    ways: dict[str, Callable[[], object]] = {}
    for name, step in (("plain", plain_step), ("private", tacit_step)):
        torch.manual_seed(0)
        model = work.build()
        method = "plain" if name == "plain" else "tacit"
        ways[name] = step(model, make(model.parameters()), work.losses, data, size, size, method)
    mean, sums = NoisyMean(Key.from_seed(1), expected_batch=size), [
        torch.zeros_like(p) for p in work.build().parameters()
    ]  # fmt: skip
    ways["noise"] = lambda: mean.release(sums, [CLIP] * len(sums), step=0, noise_multiplier=SIGMA)
    for _ in range(3):  # after so many numbers the loop is compiled
        mean.release([torch.zeros(1 << 24)], [CLIP], step=0, noise_multiplier=SIGMA)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in itertools.count():
        for name, way in ways.items():
            start = time.process_time()
            way()
            if turn > 1:
                found[name].append(time.process_time() - start)
        if turn > 8 and (sum(map(sum, found.values())) > seconds or turn > 500):
            return found
    raise AssertionError


def in_turn(
    pairs: list[tuple[str, str]], limit: float, script: str = __file__, options: Sequence[str] = ()
) -> Iterator[tuple[tuple[str, str], Measured | str]]:
    """Yield each pair's result. All prepare at the same time; they are timed one after another."""
    command = [sys.executable, script, *options, "--one"]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([*command, *pair], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for pair in pairs
    ]
    deadline = time.monotonic() + limit
    waiting = ThreadPoolExecutor(len(pairs))
    said = list(waiting.map(lambda child: _is_ready(child, deadline), started))
    for pair, child, is_ready in zip(pairs, started, said, strict=True):
        if not is_ready:
            child.kill()
        try:
            output, errors = child.communicate("now\n" if is_ready else None, timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            output, errors = child.communicate()
        if "MEASURED " in output:
            yield pair, Measured(**json.loads(output.split("MEASURED ")[1]))
            continue
        is_late = not is_ready and time.monotonic() >= deadline
        lines = [line for line in errors.splitlines() if line.strip()]
        late = f"no result within {limit:.0f} s"
        yield pair, late if is_late or not lines else lines[-1][:200]


def _is_ready(child: "subprocess.Popen[str]", deadline: float) -> bool:
    """Wait until the child is ready to be timed; return False if it ends or is too late."""
    assert child.stdout is not None
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), child.kill)
    timer.start()
    try:
        return any(line.startswith("READY") for line in child.stdout)
    finally:
        timer.cancel()


def measure(workload: str, method: str) -> Measured:
    """Measure one pair of workload and method in this process."""
    if method.startswith("jax"):
        return measure_jax(workload, is_private=method == "jax-privacy")
    import torch
    from _models import WORKLOADS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = WORKLOADS[workload]
    size = work.batch_size if device.type == "cuda" else ON_CPU.get(workload, work.batch_size)
    torch.manual_seed(0)
    model = work.build().to(device)
    home = torch.device("cpu") if method in ("plain-loader", "tacit-defaults") else device
    x, y = work.batch(lots_in(method, workload) * size, home)
    if work.channels_last:
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    parameters = [p for p in model.parameters() if p.requires_grad]
    if "gpt" in workload:
        gpu = device.type == "cuda"
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=gpu, capturable=gpu)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def losses(model: Any, batch: Any) -> Any:
        use = work.autocast and device.type == "cuda"
        with torch.autocast(device.type, torch.bfloat16, enabled=use):
            return work.losses(model, batch)

    step: Callable[[], None]
    make = {"plain": plain_step, "tacit": tacit_step, "opacus": opacus_step}[method.split("-")[0]]
    micro = min(work.microbatch or size, size)
    rest = resting_bytes(device)
    begin = time.perf_counter()
    step = make(model, optimizer, losses, (x, y), size, micro, method)
    return timed(step, device, rest, begin)


def lots_in(method: str, workload: str) -> int:
    """Return how many expected lots of records there are: many where lots are drawn by Poisson."""
    many = 8 if workload == "wrn-16-4" else 40
    return many if method in ("plain-loader", *DEFAULT_SAMPLER) else 2


def is_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def plain_step(
    model: Any, optimizer: Any, losses: Any, data: Any, size: int, micro: int, method: str
) -> Callable[[], None]:
    import torch

    def mean_loss(x: Any, y: Any) -> Any:
        return losses(model, (x, y)).sum() / size

    loss = (
        mean_loss
        if method in ("plain", "plain-loader")
        else torch.compile(mean_loss, dynamic=False)
    )
    x, y = data
    if method == "plain-loader":
        return loader_step(optimizer, loss, data, size, micro)
    if method == "plain-graph":
        return plain_graph(optimizer, loss, x, y, size, micro)

    def step() -> None:
        chosen = torch.randperm(2 * size, device=x.device)[:size]
        optimizer.zero_grad()
        for part in chosen.split(micro):
            loss(x[part], y[part]).backward()
        optimizer.step()

    return step


def loader_step(optimizer: Any, loss: Any, data: Any, size: int, micro: int) -> Callable[[], None]:
    """Return the ordinary loop: a shuffling DataLoader over tensors of the host, eager."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(*data), batch_size=size, shuffle=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    device = torch.device("cuda" if is_gpu() else "cpu")

    def step() -> None:
        batch = [t.to(device) for t in next(batches)]
        optimizer.zero_grad()
        for part in zip(*(t.split(micro) for t in batch), strict=True):
            loss(*part).backward()
        optimizer.step()

    return step


def plain_graph(
    optimizer: Any, loss: Any, x: Any, y: Any, size: int, micro: int
) -> Callable[[], None]:
    """Return the whole ordinary step, with the optimizer, as a CUDA graph that is replayed."""
    import torch

    if not x.is_cuda:
        raise NotImplementedError("CUDA graphs need a GPU")
    fixed = x[:size].clone(), y[:size].clone()

    def whole() -> None:
        optimizer.zero_grad()
        for part in zip(*(t.split(micro) for t in fixed), strict=True):
            loss(*part).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            whole()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        whole()

    def step() -> None:
        chosen = torch.randperm(2 * size, device=x.device)[:size]
        torch.index_select(x, 0, chosen, out=fixed[0])
        torch.index_select(y, 0, chosen, out=fixed[1])
        graph.replay()

    return step


def tacit_step(
    model: Any, optimizer: Any, losses: Any, data: Any, size: int, micro: int, method: str
) -> Callable[[], None]:
    import tacit
    from tacit.sampling import FixedSize
    from tacit.training import Speed

    is_compiled = method.endswith("compiled")
    options: dict[str, Any] = {"batch_size": size}
    if method in DEFAULT_SAMPLER and method != "tacit-defaults":
        options["speed"] = Speed(compile=is_compiled)
    elif method != "tacit-defaults":
        options = {
            "batch_size": FixedSize(size, len(data[0])),
            "ledger": tacit.Ledger(relation=tacit.Relation.REPLACE_ONE),
            "speed": Speed(max_microbatch=micro, compile=is_compiled),
        }
    private = tacit.make_private(
        model,
        optimizer,
        data,
        losses,
        steps=100_000,
        clip_norm=CLIP,
        noise_multiplier=SIGMA,
        **options,
    )
    lots = iter(private)

    def backward_and_update() -> None:
        next(lots)
        private.backward()
        optimizer.step()
        optimizer.zero_grad()

    if method.startswith("tacit-backward"):
        return backward_and_update
    return lambda: private.step(next(lots))


def opacus_step(
    model: Any, optimizer: Any, losses: Any, data: Any, size: int, micro: int, method: str
) -> Callable[[], None]:
    import torch
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

    x, y = data
    settings = {
        "noise_multiplier": SIGMA, "max_grad_norm": CLIP, "expected_batch_size": size,
        "loss_reduction": "sum",
    }  # fmt: skip
    ghost = method == "opacus-ghost"
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction="sum"
        )
        private = DPOptimizerFastGradientClipping(optimizer, **settings)
    else:
        wrapped = GradSampleModule(model, loss_reduction="sum")
        private = DPOptimizer(optimizer, **settings)

    def step() -> None:
        chosen = torch.randperm(2 * size, device=x.device)[:size].split(micro)
        for i, part in enumerate(chosen):
            private.signal_skip_step(do_skip=i < len(chosen) - 1)
            found = losses(wrapped, (x[part], y[part]))
            if ghost:
                found.sum().backward(retain_graph=True)
                private.zero_grad()
                factors = wrapped.get_clipping_coef()
                wrapped.disable_hooks()
                (factors * found).sum().backward()
                wrapped.enable_hooks()
            else:
                found.sum().backward()
            private.step()
            private.zero_grad()

    return step


def timed(step: Callable[[], None], device: Any, rest: float, begin: float) -> Measured:
    """Return the median over groups of steps that fill three seconds, after a warm-up.

    After the warm-up the process waits until it is told to go on (`in_turn`).
    """
    import torch

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        return (time.perf_counter() - start) / steps

    run(1)
    first = time.perf_counter() - begin
    if device.type == "cuda":
        run(150)  # until lots of nearly every size were seen and recorded
    wait_for_turn()
    before = peak_bytes(device) - rest
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run(3)
    # As in training, the host does not wait for the device after each step.
    group = max(10 if device.type == "cuda" else 1, round(0.02 / run(3)))
    times: list[float] = []
    while len(times) < 5 or (sum(times) * group < 3 and len(times) < 200):
        times.append(run(group))
    peak = peak_bytes(device) - rest
    return Measured(statistics.median(times), peak, first, statistics.mean(times), before)


def wait_for_turn() -> None:
    """Tell `in_turn` that this process is ready to be timed, and wait for its answer."""
    print("READY", flush=True)
    sys.stdin.readline()


def resting_bytes(device: Any) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return 0.0  # the model's own memory counts, as it does on the device
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def peak_bytes(device: Any) -> float:
    import torch

    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def measure_jax(workload: str, *, is_private: bool) -> Measured:
    import jax
    import optax
    from _jax_models import WORKLOADS
    from _models import WORKLOADS as TORCH

    if workload not in WORKLOADS:
        raise NotImplementedError(f"{workload} was not written in JAX")
    build, loss, make_batch = WORKLOADS[workload]
    on_gpu = jax.default_backend() != "cpu"
    size = (
        TORCH[workload].batch_size if on_gpu else ON_CPU.get(workload, TORCH[workload].batch_size)
    )
    parameters, batch = build(), make_batch(size)
    optimizer = optax.adamw(1e-4) if "gpt" in workload else optax.sgd(0.01, momentum=0.9)
    state = optimizer.init(parameters)
    if is_private:
        from jax_privacy import clipping

        micro = TORCH[workload].microbatch
        gradient = clipping.clipped_grad(
            loss, l2_clip_norm=CLIP, batch_argnums=(1, 2), normalize_by=size,
            microbatch_size=min(micro, size) if micro else None,
        )  # fmt: skip
    else:
        gradient = jax.grad(loss)

    @jax.jit
    def update(parameters: Any, state: Any, key: Any, x: Any, y: Any) -> Any:
        gradients = gradient(parameters, x, y)
        if is_private:
            leaves, tree = jax.tree.flatten(gradients)
            keys = jax.random.split(key, len(leaves))
            noisy = [
                leaf + SIGMA * CLIP / size * jax.random.normal(k, leaf.shape)
                for leaf, k in zip(leaves, keys, strict=True)
            ]
            gradients = jax.tree.unflatten(tree, noisy)
        changes, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state

    key = jax.random.key(0)
    rest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    wait_for_turn()
    times: list[float] = []
    while len(times) < 8 or (sum(times[3:]) < 3 and len(times) < 200):
        start = time.perf_counter()
        key, now = jax.random.split(key)
        parameters, state = update(parameters, state, now, *batch)
        jax.block_until_ready(parameters)
        times.append(time.perf_counter() - start)
    if on_gpu:
        peak = float(jax.devices()[0].memory_stats()["peak_bytes_in_use"])
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 - rest
    return Measured(statistics.median(times[3:]), peak)


if __name__ == "__main__":
    main()
