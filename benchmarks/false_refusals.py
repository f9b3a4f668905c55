"""Does `make_private` accept models that keep examples apart? One process per model.

    pip install transformers peft
    python benchmarks/false_refusals.py [NAME ...] [--processes 1]

Each model is made small, with random weights. It is accepted if all fresh calls of `make_private`
(20 by default) and three private steps after each of them succeed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

from _results import table, write

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = TEXT | {"intermediate_size": 48, "max_position_embeddings": 64}
ENCODER = DECODER | {"type_vocab_size": 2, "pad_token_id": 0}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 4,
}

# name: (configuration class, its arguments, task)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}, "causal"),
    "gpt-neo": (
        "GPTNeoConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
        "causal",
    ),
    "gpt-neox": ("GPTNeoXConfig", DECODER, "causal"),
    "gptj": (
        "GPTJConfig",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        "causal",
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 64,
        },
        "causal",
    ),
    "bloom": (
        "BloomConfig",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "causal",
    ),
    "falcon": ("FalconConfig", TEXT, "causal"),
    "llama": ("LlamaConfig", DECODER | {"num_key_value_heads": 2}, "causal"),
    "llama-checkpointed": ("LlamaConfig", DECODER | {"num_key_value_heads": 2}, "checkpointed"),
    "mistral": ("MistralConfig", DECODER | {"num_key_value_heads": 2}, "causal"),
    "qwen2": ("Qwen2Config", DECODER | {"num_key_value_heads": 2}, "causal"),
    "qwen3": ("Qwen3Config", DECODER | {"num_key_value_heads": 2, "head_dim": 8}, "causal"),
    "gemma": ("GemmaConfig", DECODER | {"num_key_value_heads": 2, "head_dim": 8}, "causal"),
    "gemma2": ("Gemma2Config", DECODER | {"num_key_value_heads": 2, "head_dim": 8}, "causal"),
    "phi": ("PhiConfig", DECODER, "causal"),
    "phi3": ("Phi3Config", DECODER | {"pad_token_id": 0}, "causal"),
    "stablelm": ("StableLmConfig", DECODER | {"num_key_value_heads": 2}, "causal"),
    "starcoder2": ("Starcoder2Config", DECODER | {"num_key_value_heads": 2}, "causal"),
    "cohere": ("CohereConfig", DECODER | {"num_key_value_heads": 2, "pad_token_id": 0}, "causal"),
    "olmo": ("OlmoConfig", DECODER, "causal"),
    "olmo2": ("Olmo2Config", DECODER, "causal"),
    "granite": ("GraniteConfig", DECODER, "causal"),
    "mixtral": (
        "MixtralConfig",
        DECODER | {"num_key_value_heads": 2, "num_local_experts": 4},
        "causal",
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        DECODER
        | {
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "causal",
    ),
    "olmoe": ("OlmoeConfig", DECODER | {"num_experts": 4, "num_experts_per_tok": 2}, "causal"),
    "mamba": (
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "causal",
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
        "causal",
    ),
    "bert": ("BertConfig", ENCODER, "classify"),
    "roberta": ("RobertaConfig", ENCODER, "classify"),
    "xlm-roberta": ("XLMRobertaConfig", ENCODER, "classify"),
    "distilbert": (
        "DistilBertConfig",
        {
            "vocab_size": 64,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
        "classify",
    ),
    "electra": ("ElectraConfig", ENCODER | {"embedding_size": 16}, "classify"),
    "deberta-v2": ("DebertaV2Config", ENCODER | {"relative_attention": True}, "classify"),
    "albert": ("AlbertConfig", ENCODER | {"embedding_size": 16}, "classify"),
    "mpnet": ("MPNetConfig", ENCODER, "classify"),
    "modernbert": ("ModernBertConfig", DECODER | {"pad_token_id": 0}, "classify"),
    "convbert": ("ConvBertConfig", ENCODER | {"embedding_size": 16}, "classify"),
    "squeezebert": ("SqueezeBertConfig", ENCODER | {"embedding_size": 32}, "classify"),
    "xlnet": (
        "XLNetConfig",
        {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        "classify",
    ),
    "t5": (
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "seq2seq",
    ),
    "bart": ("BartConfig", SEQ2SEQ, "seq2seq"),
    "mbart": ("MBartConfig", SEQ2SEQ, "seq2seq"),
    "pegasus": ("PegasusConfig", SEQ2SEQ, "seq2seq"),
    "whisper": (
        "WhisperConfig",
        SEQ2SEQ
        | {
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "speech",
    ),
    "wav2vec2": (
        "Wav2Vec2Config",
        {
            "vocab_size": 16,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_dim": [16, 16],
            "conv_kernel": [8, 4],
            "conv_stride": [4, 2],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.3,
            "mask_time_length": 2,
            "num_labels": 4,
            "feat_extract_norm": "layer",
        },
        "audio",
    ),
    "vit": ("ViTConfig", IMAGE, "image"),
    "deit": ("DeiTConfig", IMAGE | {"architectures": ["DeiTForImageClassification"]}, "image"),
    "dinov2": ("Dinov2Config", IMAGE, "image"),
    "swin": (
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 4,
        },
        "image",
    ),
    "convnext": (
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 4},
        "image",
    ),
    "resnet (fixed)": (
        "ResNetConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "num_labels": 4},
        "fixed image",
    ),
    "segformer": (
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "num_labels": 4,
        },
        "image",
    ),
}
ADAPTERS = (
    "lora", "dora", "rslora", "loha", "ia3", "prompt", "prefix", "p-tuning", "vera", "oft",
)  # fmt: skip


def adapted(kind: str) -> Any:
    """Return a small Llama with an adapter of peft."""
    import peft

    task = {"task_type": "CAUSAL_LM"}
    layers = {"target_modules": ["q_proj", "v_proj"]}
    config = {
        "lora": lambda: peft.LoraConfig(r=4, **layers, **task),
        "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **layers, **task),
        "rslora": lambda: peft.LoraConfig(r=4, use_rslora=True, **layers, **task),
        "loha": lambda: peft.LoHaConfig(r=4, **layers, **task),
        "ia3": lambda: peft.IA3Config(**layers, feedforward_modules=[], **task),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **task),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **task),
        "p-tuning": lambda: peft.PromptEncoderConfig(
            num_virtual_tokens=4, encoder_hidden_size=16, **task
        ),
        "vera": lambda: peft.VeraConfig(r=4, **layers, **task),
        "oft": lambda: peft.OFTConfig(oft_block_size=4, **layers, **task),
    }[kind]()
    return peft.get_peft_model(transformer("llama"), config)


def transformer(name: str) -> Any:
    """Return a small model of transformers with random weights."""
    import transformers

    import tacit.training

    config_name, arguments, task = MODELS[name]
    config = getattr(transformers, config_name)(**arguments)
    kind = {
        "causal": transformers.AutoModelForCausalLM,
        "checkpointed": transformers.AutoModelForCausalLM,
        "classify": transformers.AutoModelForSequenceClassification,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "speech": transformers.WhisperForConditionalGeneration,
        "audio": transformers.AutoModelForAudioClassification,
        "image": transformers.AutoModelForImageClassification,
        "fixed image": transformers.AutoModelForImageClassification,
    }[task]
    build = kind.from_config if hasattr(kind, "from_config") else kind
    model = build(config).train()
    if task == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return tacit.training.fix(model) if task == "fixed image" else model


def batch_and_loss(task: str) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Return synthetic records and a loss for each example."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    tokens, labels = torch.randint(3, 60, (64, 12)), torch.randint(0, 2, (64,))

    def next_token(model: Any, batch: Any) -> Any:
        (ids,) = batch
        logits = model(input_ids=ids).logits[:, -ids.shape[1] :]
        return cross_entropy(
            logits[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none"
        ).mean(1)

    def classify(key: str) -> Callable[[Any, Any], Any]:
        def loss(model: Any, batch: Any) -> Any:
            x, y = batch
            return cross_entropy(model(**{key: x}).logits.float(), y, reduction="none")

        return loss

    def translate(key: str) -> Callable[[Any, Any], Any]:
        def loss(model: Any, batch: Any) -> Any:
            x, ids = batch
            logits = model(**{key: x}, decoder_input_ids=ids[:, :-1]).logits
            return cross_entropy(logits.transpose(1, 2).float(), ids[:, 1:], reduction="none").mean(
                1
            )

        return loss

    return {
        "causal": ((tokens,), next_token),
        "checkpointed": ((tokens,), next_token),
        "classify": ((tokens, labels), classify("input_ids")),
        "seq2seq": ((tokens, tokens[:, :8]), translate("input_ids")),
        "speech": ((torch.randn(64, 8, 32), tokens[:, :8]), translate("input_features")),
        "audio": ((torch.randn(64, 400), labels), classify("input_values")),
        "image": ((torch.randn(64, 3, 32, 32), labels), classify("pixel_values")),
        "fixed image": ((torch.randn(64, 3, 32, 32), labels), classify("pixel_values")),
    }[task]


class Found(NamedTuple):
    """What came of the fresh calls of `make_private` for one model."""

    refused: int
    calls: int
    seconds: float
    reason: str


def count_refusals(
    model: Any, records: Any, loss_fn: Any, *, calls: int, batch_size: int, steps: int = 3
) -> Found:
    """Make `model` private in fresh calls, take private steps, and count the refusals.

    What was found so far is printed after each call.
    """
    import torch

    import tacit

    warnings.simplefilter("ignore")
    start, refused, reason = time.perf_counter(), 0, ""
    found = Found(0, 0, 0.0, "")
    for call in range(calls):
        parameters = [p for p in model.parameters() if p.requires_grad]
        try:
            private = tacit.make_private(
                model,
                torch.optim.SGD(parameters, lr=1e-3),
                records,
                loss_fn,
                batch_size=batch_size,
                steps=steps,
                clip_norm=1.0,
                noise_multiplier=1.0,
            )
            for lot in private:
                private.step(lot)
        except tacit.errors.IncompatibleModel as error:
            refused, reason = refused + 1, str(error)
        found = Found(refused, call + 1, time.perf_counter() - start, reason)
        print("FOUND", json.dumps(found._asdict()), flush=True)
    return found


def in_processes(
    script: str, names: Sequence[str], *, calls: int, limit: float, processes: int = 1
) -> list[tuple[str, str, str, str]]:
    """Run `script NAME --one` for every name, in a process each; return rows of a table."""

    def run(name: str) -> tuple[str, str, str, str]:
        command = [sys.executable, script, name, "--one", "--calls", str(calls)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, check=False
            )
            output = done.stdout
            failure = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        except subprocess.TimeoutExpired as late:  # what was found until then counts
            output = (late.stdout or b"").decode()
            failure = f"no result within {limit:.0f} s"
        found = [line for line in output.splitlines() if line.startswith("FOUND ")]
        if found:
            one = Found(**json.loads(found[-1].removeprefix("FOUND ")))
            row = (name, f"{one.refused} of {one.calls}", f"{one.seconds:.0f}", one.reason[:120])
        else:
            row = (name, "failed", "", failure[:160])
        print(" | ".join(row), flush=True)
        return row

    with ThreadPool(processes) as pool:
        return pool.map(run, names, chunksize=1)


def report(name: str, title: str, packages: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write the table of results, with the number of models that were refused or failed."""
    total = sum(not row[1].startswith("0 of") for row in rows)
    summary = f"{len(rows)} models, one process each; {total} were refused at least once or failed."
    write(name, title, packages, summary, table(["model", "refused", "seconds", "reason"], rows))


def try_one(name: str, calls: int) -> None:
    """Run one model in this process and print what came of it."""
    import torch

    torch.set_num_threads(1)
    is_adapter = name in ADAPTERS
    model = adapted(name) if is_adapter else transformer(name)
    records, loss_fn = batch_and_loss("causal" if is_adapter else MODELS[name][2])
    count_refusals(model, records, loss_fn, calls=calls, batch_size=8)


def main() -> None:
    """Try every model in a process of its own and write results/false-refusals.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    if options.one:
        try_one(options.names[0], options.calls)
        return
    names = options.names or [*MODELS, *ADAPTERS]
    rows = in_processes(
        __file__, names, calls=options.calls, limit=1800, processes=options.processes
    )
    title = f"Refusals of models that keep examples apart, {options.calls} fresh calls each"
    report("false-refusals", title, ("tacit", "torch", "transformers", "peft"), rows)


if __name__ == "__main__":
    main()
