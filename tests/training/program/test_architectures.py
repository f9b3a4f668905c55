"""The clipped sums of many architectures equal those of a loop over the examples, in float64."""

import math

import pytest
import torch
from architectures import ARCHITECTURES, EXAMPLES

from tacit.training import Flat, record_loop
from tacit.training.examples import Examples
from tacit.training.program import mapped
from tacit.training.program.one_example import Untraceable
from tacit.training.program.programs import Programs
from tacit.training.tree import map_tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
QUICK = {
    "bert", "llama", "lora_gpt2", "message_passing", "resnet_group_norm", "unet_diffusion", "lstm",
    "gated_mlp_einsum", "binarized", "dlrm", "merged_lora", "transformer", "repvgg",
}  # fmt: skip
# What asks for values of an example, or differentiates the model in its loss.
IN_THE_LOOP = {"wav2vec2_ctc", "physics_informed"}
# More than half of these models' parameters are copied for each example.
COPIED = {"prefix_tuning", "prompt_tuning"}  # all of them, as tokens beside those of an example


def in_double(name):
    model, loss_fn, batch = ARCHITECTURES[name]()
    batch = map_tensors(lambda t: t.double() if t.is_floating_point() else t, batch)
    mask = torch.ones(EXAMPLES, dtype=torch.bool)
    return Examples(model.double(), loss_fn, batch, mask)


def share_of_copies(examples, labels):
    """Share of the parameters from which the copied values are computed."""
    programs = Programs.of(examples.model, examples.loss_fn, 1)
    program = programs.program_of(examples.batch)
    nodes = {node.name: node for node in program.graph.graph.nodes}
    found, pending = set(), []
    for label in labels:
        if label.startswith("%"):
            pending.append(nodes[label[1:]])
        else:
            found.add(label)
    while pending:
        node = pending.pop()
        if node.target is not torch.ops.aten.detach.default:
            pending += node.all_input_nodes
        if node.op == "placeholder" and node.name.startswith("value_"):
            found.add(program.names[int(node.name.removeprefix("value_"))])
    sizes = {name: p.numel() for name, p in examples.parameters.items()}
    return sum(sizes.get(name, 0) for name in found) / sum(sizes.values())


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES]
)
def test_clipped_sum_equals_a_loop_over_examples(name, monkeypatch):
    examples, clip = in_double(name), Flat(0.5)
    copied, copy = [], mapped.MappedTape.copy
    monkeypatch.setattr(
        mapped.MappedTape,
        "copy",
        lambda tape, t: copied.append(tape.labels[id(t)]) or copy(tape, t),
    )
    if name in IN_THE_LOOP:
        with pytest.raises(Untraceable):
            mapped.run(examples, clip)
        return
    found, expected = mapped.run(examples, clip).sums, record_loop.run(examples, clip).sums
    size = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    wrong = math.sqrt(sum(float((found[n] - v).square().sum()) for n, v in expected.items()))
    assert 0 < wrong + size < math.inf
    # The scan of Mamba is in float32, whatever the type of the model.
    assert wrong <= (1e-8 if name == "mamba" else 1e-10) * size
    assert share_of_copies(examples, copied) <= 0.5 or name in COPIED


def test_the_list_is_long_and_few_models_are_copied():
    assert len(ARCHITECTURES) - len(IN_THE_LOOP) >= 64
    assert len(COPIED) <= 5
