"""Small models of many architectures with random weights, each with a loss and a synthetic batch.

`ARCHITECTURES` maps a name to a function that returns (model, loss_fn, batch). The models have two
layers and widths of 8 to 64, dropout is off, and every parameter holds random numbers (zeros, as in
a new LoRA adapter, would make gradients vanish). Nothing mixes examples.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

LossFn = Callable[[nn.Module, Any], Tensor]
Built = tuple[nn.Module, LossFn, Any]
EXAMPLES, LENGTH, WORDS, CLASSES = 6, 7, 40, 3
ARCHITECTURES: dict[str, Callable[[], Built]] = {}


def architecture(build: Callable[[], Built]) -> Callable[[], Built]:
    """Add a function to the list, under its own name."""
    _add(build.__name__, build)
    return build


def _add(name: str, build: Callable[[], Built]) -> None:
    def built() -> Built:
        torch.manual_seed(sum(map(ord, name)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, loss_fn, batch = build()
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point():
                    p.add_(0.1 * torch.randn_like(p))
        return model, loss_fn, batch

    ARCHITECTURES[name] = built


# Losses and batches -------------------------------------------------------------------------------


def classes(*shape: int) -> Tensor:
    return torch.randint(CLASSES, (EXAMPLES, *shape))


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(5, WORDS, (EXAMPLES, length))


def numbers(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape)


def kept() -> Tensor:
    """An attention mask: each example is padded on the right, to the same length."""
    ends = torch.randint(3, LENGTH + 1, (EXAMPLES, 1))
    return (torch.arange(LENGTH) < ends).long()


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def of_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of a Hugging Face classifier: a dict with `labels`, the rest are inputs."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def next_word(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), None, None,
                             -100, None, "none")  # fmt: skip
    return losses.view(len(logits), -1).mean(1)


def each_word(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Loss of masked words or of a translation: labels of -100 are left out, as in the library."""
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    logits, targets = model(**inputs).logits, batch["targets"]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return losses.sum(1) / (targets != -100).sum(1).clamp_min(1)


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().flatten(1).mean(1)


def reconstruction(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[0]).square().flatten(1).mean(1)


# Hugging Face: text -------------------------------------------------------------------------------

SMALL = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "dropout": 0.0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 1, "head_dim": 8}


def hugging(kind: str, head: str, settings: dict[str, Any], **more: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, kind + "Config")(**settings | more)
    model = getattr(transformers, kind.removesuffix("Text") + head)(config)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if hasattr(model, "set_experts_implementation") and "num_experts_per_tok" in settings:
        model.set_experts_implementation("batched_mm")  # the default has no float64
    return model.train(kind == "Rwkv")  # which writes into its weights in evaluation


def _text(kind: str, head: str = "ForSequenceClassification", **more: Any) -> Callable[[], Built]:
    def build() -> Built:
        model = hugging(kind, head, SMALL, **more)
        batch = {"input_ids": words(), "attention_mask": kept(), "labels": classes()}
        return model, of_logits, batch

    return build


def _causal(kind: str, head: str = "ForCausalLM", /, **more: Any) -> Callable[[], Built]:
    def build() -> Built:
        settings = {k: v for k, v in (GROUPED | more).items() if v is not None}
        return hugging(kind, head, settings), next_word, {"input_ids": words()}

    return build


def _masked(kind: str, **more: Any) -> Callable[[], Built]:
    def build() -> Built:
        targets = torch.where(torch.rand(EXAMPLES, LENGTH) < 0.4, words(), -100)
        batch = {"input_ids": words(), "attention_mask": kept(), "targets": targets}
        return hugging(kind, "ForMaskedLM", SMALL, **more), each_word, batch

    return build


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "n_inner": 24,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
           "num_experts": 4}  # fmt: skip
TEXT = {
    "bert": _text("Bert"),
    "bert_words": _masked("Bert"),
    "roberta": _text("Roberta", max_position_embeddings=40),
    "distilbert": _text("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=24,
                        seq_classif_dropout=0.0),
    "deberta_v2": _text("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"],
                        position_buckets=4, max_relative_positions=8, share_att_key=True,
                        norm_rel_ebd="layer_norm", pooler_hidden_size=16, pooler_dropout=0.0),
    "electra": _text("Electra", embedding_size=8),
    "albert": _text("Albert", embedding_size=8, classifier_dropout_prob=0.0),
    "mpnet": _text("MPNet", max_position_embeddings=40),
    "modernbert": _text("ModernBert", global_attn_every_n_layers=2, local_attention=4),
    "fnet": _masked("FNet"),
    "squeezebert": _text("SqueezeBert", embedding_size=16, q_groups=2, k_groups=2, v_groups=2,
                         post_attention_groups=1, intermediate_groups=2, output_groups=2),
    "gpt2": _causal("GPT2", "LMHeadModel", **GPT2),
    "gpt_neo": _causal("GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2,
                       num_heads=2, window_size=4, embed_dropout=0.0, resid_dropout=0.0),
    "gpt_neox": _causal("GPTNeoX"),
    "gptj": _causal("GPTJ", **GPT2, rotary_dim=4),
    "opt": _causal("OPT", ffn_dim=24, word_embed_proj_dim=8),
    "bloom": _causal("Bloom", n_layer=2, n_head=2),
    "falcon": _causal("Falcon", alibi=False, new_decoder_architecture=True, num_kv_heads=1,
                      head_dim=None),
    "llama": _causal("Llama"),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3", tie_word_embeddings=True),
    "gemma": _causal("Gemma"),
    "gemma3": _causal("Gemma3Text", sliding_window=4, query_pre_attn_scalar=8),
    "mistral": _causal("Mistral", sliding_window=4),
    "phi": _causal("Phi"),
    "olmo2": _causal("Olmo2"),
    "mixtral": _causal("Mixtral", **EXPERTS),
    "qwen2_moe": _causal("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=8),
    "mamba": _causal("Mamba", state_size=4, expand=2, conv_kernel=3, time_step_rank=2),
    "mamba2": _causal("Mamba2", state_size=4, expand=2, conv_kernel=3, num_heads=4, head_dim=8,
                      n_groups=1, chunk_size=4),
    "rwkv": _causal("Rwkv", attention_hidden_size=16, context_length=32),
}  # fmt: skip
for _name, _build in TEXT.items():
    _add(_name, _build)


def _translation(kind: str, **more: Any) -> Callable[[], Built]:
    def build() -> Built:
        settings = SMALL | {
            "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
            "decoder_start_token_id": 2, "activation_dropout": 0.0,
        }  # fmt: skip
        batch = {
            "input_ids": words(), "attention_mask": kept(), "decoder_input_ids": words(5),
            "targets": words(5),
        }  # fmt: skip
        return hugging(kind, "ForConditionalGeneration", settings | more), each_word, batch

    return build


_add("t5", _translation("T5", num_layers=2, d_kv=8, d_ff=24, num_heads=2, dropout_rate=0.0,
                        relative_attention_num_buckets=8))  # fmt: skip
_add("bart", _translation("Bart"))
_add("pegasus", _translation("Pegasus"))


@architecture
def prefix_tuning() -> Built:
    import peft

    model = hugging("GPT2", "LMHeadModel", SMALL, **GPT2)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    batch = {"input_ids": words(), "attention_mask": torch.ones_like(words())}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**batch).logits[:, :-1]
        return F.cross_entropy(
            logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
        ).mean(1)

    return peft.get_peft_model(model, config).eval(), loss_fn, batch


@architecture
def prompt_tuning() -> Built:
    import peft

    model = hugging("GPT2", "LMHeadModel", SMALL, **GPT2)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    batch = {"input_ids": words(), "attention_mask": torch.ones_like(words())}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = model(**batch).logits[:, 3:-1]
        return F.cross_entropy(
            logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
        ).mean(1)

    return peft.get_peft_model(model, config).eval(), loss_fn, batch


def _adapted(kind: str, **settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        import peft

        model = hugging("GPT2", "LMHeadModel", SMALL, **GPT2)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", fan_in_fan_out=True, **settings)
        return peft.get_peft_model(model, config).eval(), next_word, {"input_ids": words()}

    return build


_add("lora_gpt2", _adapted("LoraConfig", r=3, lora_alpha=6, target_modules=["c_attn", "c_proj"]))
_add("dora_gpt2", _adapted("LoraConfig", r=3, target_modules=["c_attn"], use_dora=True))
_add("ia3_gpt2", _adapted("IA3Config", target_modules=["c_attn", "c_proj"],
                          feedforward_modules=["c_proj"]))  # fmt: skip


@architecture
def checkpointed_llama() -> Built:
    model = hugging("Llama", "ForCausalLM", GROUPED)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train(), next_word, {"input_ids": words()}


@architecture
def autocast_gpt2() -> Built:
    model = hugging("GPT2", "LMHeadModel", SMALL, **GPT2)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        is_double = next(model.parameters()).dtype == torch.float64
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_double):
            return next_word(model, batch)

    return model, loss_fn, {"input_ids": words()}


@architecture
def tapas() -> Built:
    model = hugging("Tapas", "ForSequenceClassification", SMALL,
                    type_vocab_sizes=[3, 8, 8, 2, 8, 8, 4])  # fmt: skip
    types = torch.stack([torch.randint(n, (EXAMPLES, LENGTH)) for n in (3, 8, 8, 2, 8, 8, 4)], 2)
    batch = {"input_ids": words(), "attention_mask": kept(), "token_type_ids": types,
             "labels": classes()}  # fmt: skip
    return model, of_logits, batch


# Hugging Face: pictures, sound, series ------------------------------------------------------------


def _vision(kind: str, size: int = 16, **more: Any) -> Callable[[], Built]:
    def build() -> Built:
        settings = SMALL | {"image_size": size, "patch_size": 4, "num_channels": 3} | more
        settings = {k: v for k, v in settings.items() if v is not None}
        model = hugging(kind, "ForImageClassification", settings)
        return model, of_logits, {"pixel_values": numbers(3, size, size), "labels": classes()}

    return build


STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "drop_path_rate": 0.0}
VISION = {
    "vit": _vision("ViT"),
    "deit": _vision("DeiT"),
    "beit": _vision("Beit", use_relative_position_bias=True, use_mask_token=False,
                    drop_path_rate=0.0, out_indices=[1]),
    "swin": _vision("Swin", embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2,
                    patch_size=2, drop_path_rate=0.0, num_attention_heads=None,
                  num_hidden_layers=None),
    "convnext": _vision("ConvNext", num_stages=2, patch_size=2, **STAGES),
    "convnext_v2": _vision("ConvNextV2", num_stages=2, patch_size=2, **STAGES),
    "dinov2": _vision("Dinov2", mlp_ratio=2, drop_path_rate=0.0),
    "poolformer": _vision("PoolFormer", num_encoder_blocks=2, patch_sizes=[3, 3], strides=[2, 2],
                          padding=[1, 1], mlp_ratio=2.0, **STAGES),
    "segformer": _vision("Segformer", size=32, num_encoder_blocks=2, sr_ratios=[2, 1],
                         patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2],
                         num_attention_heads=[1, 2], classifier_dropout_prob=0.0, **STAGES),
}  # fmt: skip
for _name, _build in VISION.items():
    _add(_name, _build)


@architecture
def clip_zero_shot() -> Built:
    """Pictures against the texts of all classes, which are the same for every example."""
    import transformers

    text = SMALL | {"projection_dim": 8, "eos_token_id": WORDS - 1}
    config = transformers.CLIPConfig(
        text_config=text, projection_dim=8,
        vision_config=SMALL | {"image_size": 16, "patch_size": 4, "projection_dim": 8},
    )  # fmt: skip
    model = transformers.CLIPModel(config).eval()
    texts = torch.cat([torch.randint(3, WORDS - 1, (CLASSES, 4)), torch.full((CLASSES, 1), 39)], 1)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        pixels, y = batch
        logits = model(input_ids=texts, pixel_values=pixels).logits_per_image
        return F.cross_entropy(logits, y, reduction="none")

    return model, loss_fn, (numbers(3, 16, 16), classes())


@architecture
def whisper() -> Built:
    model = hugging(
        "Whisper", "ForConditionalGeneration", SMALL, d_model=16, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=10, max_target_positions=16,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    batch = {"input_features": numbers(8, 20), "decoder_input_ids": words(5), "targets": words(5)}
    return model, each_word, batch


SPEECH = {
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_proj_dropout": 0.0,
    "mask_time_prob": 0.0, "apply_spec_augment": False, "activation_dropout": 0.0,
    "layerdrop": 0.0, "final_dropout": 0.0, "classifier_proj_size": 8, "hidden_dropout": 0.0,
}  # fmt: skip


def _speech(kind: str) -> Callable[[], Built]:
    def build() -> Built:
        model = hugging(kind, "ForSequenceClassification", SMALL, **SPEECH)
        return model, of_logits, {"input_values": numbers(160), "labels": classes()}

    return build


_add("wav2vec2", _speech("Wav2Vec2"))
_add("hubert", _speech("Hubert"))


@architecture
def wav2vec2_ctc() -> Built:
    model = hugging("Wav2Vec2", "ForCTC", SMALL, **SPEECH)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        sound, y = batch
        steps = model(input_values=sound).logits.log_softmax(2).transpose(0, 1)
        full = torch.full((len(y),), steps.shape[0]), torch.full((len(y),), y.shape[1])
        return F.ctc_loss(steps, y, *full, reduction="none")

    return model, loss_fn, (numbers(160), words(3))


@architecture
def patchtst() -> Built:
    model = hugging(
        "PatchTST", "ForPrediction", {}, num_input_channels=2, context_length=16, patch_length=4,
        patch_stride=4, num_hidden_layers=2, d_model=16, num_attention_heads=2, ffn_dim=24,
        prediction_length=4, head_dropout=0.0, norm_type="layernorm",
    )  # fmt: skip

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        past, future = batch
        found = model(past_values=past).prediction_outputs
        if isinstance(found, tuple):
            found = found[0]
        return (found - future).square().flatten(1).mean(1)

    return model, loss_fn, (numbers(16, 2), numbers(4, 2))


@architecture
def time_series_transformer() -> Built:
    import transformers

    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, input_size=1, lags_sequence=[1, 2],
        num_time_features=1, d_model=16, encoder_layers=2, decoder_layers=2, dropout=0.0,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_layerdrop=0.0, decoder_layerdrop=0.0, attention_dropout=0.0,
        activation_dropout=0.0,
    )  # fmt: skip
    model = transformers.TimeSeriesTransformerModel(config).eval()
    head = nn.Linear(16, 1)
    both = nn.ModuleList([model, head])

    def loss_fn(both: nn.Module, batch: Any) -> Tensor:
        hidden = both[0](**batch, past_observed_mask=torch.ones_like(batch["past_values"]))
        return (both[1](hidden[0]).squeeze(2) - batch["future_values"]).square().mean(1)

    batch = {
        "past_values": numbers(10), "past_time_features": numbers(10, 1),
        "future_values": numbers(4), "future_time_features": numbers(4, 1),
    }  # fmt: skip
    return both, loss_fn, batch


# Tables, sets and graphs --------------------------------------------------------------------------


class Tokenizer(nn.Module):
    """A token for each column of a table: numbers and categories, as in FT-Transformer."""

    def __init__(self, numeric: int, categories: list[int], width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numeric, width))
        self.bias = nn.Parameter(torch.randn(numeric + len(categories), width))
        self.table = nn.Embedding(sum(categories), width)
        self.cls = nn.Parameter(torch.randn(width))
        starts = torch.tensor([0, *categories[:-1]]).cumsum(0)
        self.register_buffer("starts", starts)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        tokens = torch.cat([x.unsqueeze(-1) * self.weight, self.table(c + self.starts)], 1)
        tokens = tokens + self.bias
        return torch.cat([self.cls.expand(len(x), 1, -1), tokens], 1)


@architecture
def ft_transformer() -> Built:
    class FT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = Tokenizer(4, [3, 5], 16)
            layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Sequential(nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, CLASSES))

        def forward(self, x: Any) -> Tensor:
            return self.head(self.body(self.tokens(*x))[:, 0])

    c = torch.stack([torch.randint(3, (EXAMPLES,)), torch.randint(5, (EXAMPLES,))], 1)
    return FT(), cross_entropy, ((numbers(4), c), classes())


@architecture
def table_in_context() -> Built:
    """A TabPFN-like transformer: an example is a small table, attention over rows and columns."""

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.label = nn.Linear(1, 16), nn.Embedding(CLASSES + 1, 16)
            self.columns = nn.Parameter(torch.randn(4, 16))
            make = lambda: nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)  # noqa: E731
            self.over_columns = nn.ModuleList(make() for _ in range(2))
            self.over_rows = nn.ModuleList(make() for _ in range(2))
            self.head = nn.Linear(16, CLASSES)

        def forward(self, batch: Any) -> Tensor:
            x, y = batch  # (examples, rows, columns), (examples, rows - 1)
            known = F.pad(y, (0, 1), value=CLASSES)
            h = torch.cat([self.cell(x.unsqueeze(-1)), self.label(known).unsqueeze(2)], 2)
            h = h + self.columns
            n, r, c, d = h.shape
            for columns, rows in zip(self.over_columns, self.over_rows, strict=True):
                h = columns(h.reshape(n * r, c, d)).view(n, r, c, d)
                h = rows(h.transpose(1, 2).reshape(n * c, r, d)).view(n, c, r, d).transpose(1, 2)
            return self.head(h[:, -1, -1])

    return Cells(), cross_entropy, ((numbers(5, 3), classes(4)), classes())


@architecture
def tabnet() -> Built:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Linear(8, 6)
            self.own = nn.Linear(16, 32)

    class TabNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.first = nn.Linear(6, 32), nn.Linear(16, 32)
            self.norm = nn.LayerNorm(6)
            self.steps = nn.ModuleList(Step() for _ in range(3))
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            prior, out = torch.ones_like(x), 0.0
            h = F.glu(self.first(F.glu(self.shared(x))))
            for step in self.steps:
                ordered = (step.mask(h[:, 8:]) * prior).sort(1, descending=True)[0]
                ranks = torch.arange(1, 7, device=x.device, dtype=x.dtype)
                support = (1 + ranks * ordered > ordered.cumsum(1)).sum(1, keepdim=True)
                tau = (ordered.cumsum(1).gather(1, support - 1) - 1) / support
                mask = (step.mask(h[:, 8:]) * prior - tau).clamp_min(0)  # sparsemax
                prior = prior * (1.3 - mask)
                one = F.glu(self.shared(mask * x))
                h = (one + F.glu(step.own(one))) * math.sqrt(0.5)
                out = out + h[:, :8].relu()
            return self.head(out)

    return TabNet(), cross_entropy, (numbers(6), classes())


@architecture
def dlrm() -> Built:
    class DLRM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
            self.bags = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in (20, 30, 11))
            self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
            x = self.bottom(dense)
            rows = torch.stack([x, *(bag(ids[:, i]) for i, bag in enumerate(self.bags))], 1)
            products = rows @ rows.transpose(1, 2)
            i, j = torch.tril_indices(4, 4, -1)
            return self.top(torch.cat([x, products[:, i, j]], 1)).squeeze(1)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        dense, ids, y = batch
        return F.binary_cross_entropy_with_logits(model(dense, ids), y, reduction="none")

    ids = torch.randint(11, (EXAMPLES, 3, 2))
    return DLRM(), loss_fn, (numbers(5), ids, torch.rand(EXAMPLES).round())


@architecture
def wide_and_deep() -> Built:
    """Bags of several lengths by offsets would mix; here with weights for each entry."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(WORDS, 8, mode="sum", padding_idx=0)
            self.mean = nn.EmbeddingBag(WORDS, 8, mode="mean")
            self.wide = nn.Embedding(WORDS, CLASSES)
            self.deep = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, CLASSES))

        def forward(self, x: Any) -> Tensor:
            ids, weights = x
            bags = torch.cat([self.bag(ids, per_sample_weights=weights), self.mean(ids)], 1)
            return self.wide(ids).sum(1) + self.deep(bags)

    return Wide(), cross_entropy, ((words(), numbers(LENGTH)), classes())


@architecture
def deep_sets() -> Built:
    class DeepSets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16))
            self.outer = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, CLASSES))

        def forward(self, x: Any) -> Tensor:
            points, is_used = x
            h = self.inner(points) * is_used.unsqueeze(2)
            highest = h.masked_fill(~is_used.unsqueeze(2), -1e4).amax(1)
            return self.outer(torch.cat([h.sum(1) / is_used.sum(1, keepdim=True), highest], 1))

    is_used = torch.arange(9) < torch.randint(2, 9, (EXAMPLES, 1))
    return DeepSets(), cross_entropy, ((numbers(9, 3), is_used), classes())


@architecture
def message_passing() -> Built:
    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.edge = nn.Linear(4, 8), nn.Linear(8 + 8 + 2, 8)
            self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, CLASSES)

        def forward(self, graph: dict[str, Tensor]) -> Tensor:
            h, ends, edges = self.enter(graph["x"]), graph["edge_index"], graph["edge_attr"]
            n, v, d = h.shape
            source, target = ends.unsqueeze(-1).expand(-1, -1, -1, d).unbind(1)
            for _ in range(2):
                pairs = torch.cat([h.gather(1, source), h.gather(1, target), edges], 2)
                sums = torch.zeros_like(h).scatter_add(1, target, self.edge(pairs).relu())
                h = self.cell(sums.view(n * v, d), h.reshape(n * v, d)).view(n, v, d)
            return self.head(h.mean(1))

    def loss_fn(model: nn.Module, graph: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(graph), graph["y"], reduction="none")

    graph = {
        "x": numbers(5, 4), "edge_index": torch.randint(5, (EXAMPLES, 2, 8)),
        "edge_attr": numbers(8, 2), "y": classes(),
    }  # fmt: skip
    return Messages(), loss_fn, graph


@architecture
def graph_attention() -> Built:
    class GAT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.ModuleList([nn.Linear(4, 16, False), nn.Linear(16, 16, False)])
            self.left = nn.Parameter(torch.randn(2, 2, 8))
            self.right = nn.Parameter(torch.randn(2, 2, 8))
            self.bias = nn.Parameter(torch.randn(2, 16))
            self.head = nn.Linear(16, CLASSES)

        def forward(self, x: Any) -> Tensor:
            h, adjacency = x
            for i, enter in enumerate(self.enter):
                z = enter(h).unflatten(2, (2, 8))  # (examples, nodes, heads, width)
                scores = (z * self.left[i]).sum(-1).unsqueeze(2) + (z * self.right[i]).sum(
                    -1
                ).unsqueeze(1)
                scores = F.leaky_relu(scores, 0.2).masked_fill(~adjacency.unsqueeze(3), -1e9)
                h = torch.einsum("nijh,njhd->nihd", scores.softmax(2), z).flatten(2)
                h = F.elu(h + self.bias[i])
            return self.head(h.mean(1))

    adjacency = (torch.rand(EXAMPLES, 5, 5) < 0.4) | torch.eye(5, dtype=torch.bool)
    return GAT(), cross_entropy, ((numbers(5, 4), adjacency), classes())


@architecture
def graph_convolution() -> Built:
    """One graph for all examples, a constant; each example has its own features of the nodes."""

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            ends = torch.rand(6, 6) < 0.5
            adjacency = (ends | ends.T | torch.eye(6, dtype=torch.bool)).float()
            self.register_buffer("adjacency", adjacency / adjacency.sum(1, keepdim=True))
            self.one, self.two = nn.Linear(3, 8), nn.Linear(8, CLASSES)
            self.node = nn.Parameter(torch.randn(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(self.adjacency @ x).relu()
            return (self.two(self.adjacency @ h) * self.node.softmax(0)).sum(1)

    return GCN(), cross_entropy, (numbers(6, 3), classes())


# Convolutions -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.GroupNorm(2, b), nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.GroupNorm(2, b),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.GroupNorm(2, b))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x).add_(self.short(x)), inplace=True)


def picture(size: int = 12) -> tuple[Tensor, Tensor]:
    return numbers(3, size, size), classes()


def top(width: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


@architecture
def resnet_group_norm() -> Built:
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, Block(8, 8, 1), Block(8, 16, 2), top(16)), cross_entropy, picture()


@architecture
def mnist_cnn() -> Built:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, 2, padding=2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(8, 8, 3),
        nn.ReLU(), nn.AvgPool2d(2, 1), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(),
        nn.Linear(16, CLASSES),
    )  # fmt: skip
    return model, cross_entropy, picture()


class Standardized(nn.Conv2d):
    """A convolution with standardized weights, as in NFNet and big transfer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        scale = torch.rsqrt((variance * self.weight[0].numel()).clamp_min(1e-4))
        weight = (self.weight - mean) * scale * self.gain
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, 1, self.groups)


@architecture
def nfnet() -> Built:
    class NF(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Standardized(3, 8, 3, 1, 1)
            self.convs = nn.ModuleList(Standardized(8, 8, 3, 1, 1, groups=2) for _ in range(2))
            self.skip = nn.Parameter(torch.zeros(2))
            self.squeeze = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1),
                nn.Sigmoid(),
            )  # fmt: skip
            self.top = top(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for i, conv in enumerate(self.convs):
                y = conv(F.gelu(x) * 1.7 * 0.9)
                x = x + y * self.squeeze(y) * 2 * self.skip[i] * 0.2
            return self.top(x)

    return NF(), cross_entropy, picture()


@architecture
def repvgg() -> Built:
    class Rep(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.three, self.one = nn.Conv2d(a, b, 3, 1, 1), nn.Conv2d(a, b, 1)
            self.identity = nn.Parameter(torch.ones(b)) if a == b else None

        def forward(self, x: Tensor) -> Tensor:
            kernel = self.three.weight + F.pad(self.one.weight, (1, 1, 1, 1))
            if self.identity is not None:
                kernel = kernel + F.pad(torch.diag(self.identity)[..., None, None], (1, 1, 1, 1))
            return F.conv2d(x, kernel, self.three.bias + self.one.bias, padding=1).relu()

    return nn.Sequential(Rep(3, 8), Rep(8, 8), top(8)), cross_entropy, picture()


@architecture
def efficientnet() -> Built:
    class MBConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expand = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.GroupNorm(4, 16))
            self.depth = nn.Sequential(
                nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.GroupNorm(4, 16)
            )
            self.squeeze = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.SiLU(), nn.Conv2d(4, 16, 1),
                nn.Sigmoid(),
            )  # fmt: skip
            self.project = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.GroupNorm(2, 8))

        def forward(self, x: Tensor) -> Tensor:
            h = F.silu(self.depth(F.silu(self.expand(x), inplace=True)), inplace=True)
            return x + self.project(h * self.squeeze(h))

    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
    return nn.Sequential(stem, MBConv(), MBConv(), top(8)), cross_entropy, picture()


@architecture
def squeeze_excite() -> Built:
    """Squeeze and excite by linear layers, with instance norm and a PReLU for each channel."""

    class SE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)
            self.act, self.excite = nn.PReLU(8), nn.Sequential(
                nn.Linear(8, 2), nn.Softsign(), nn.Linear(2, 8), nn.Hardsigmoid()
            )  # fmt: skip
            self.top = top(8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x)
            h = self.act(self.norm(h)) * self.excite(h.mean((2, 3)))[..., None, None]
            return self.top(h)

    return SE(), cross_entropy, picture()


def sinusoids(t: Tensor, width: int) -> Tensor:
    steps = torch.exp(-math.log(1e4) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None] * steps.to(t.dtype)
    return torch.cat([angles.cos(), angles.sin()], 1)


@architecture
def unet_diffusion() -> Built:
    class Res(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(2, a), nn.Conv2d(a, b, 3, 1, 1)
            self.norm2, self.conv2 = nn.GroupNorm(2, b), nn.Conv2d(b, b, 3, 1, 1)
            self.time, self.short = nn.Linear(16, 2 * b), nn.Conv2d(a, b, 1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            scale, shift = self.time(F.silu(t))[..., None, None].chunk(2, 1)
            h = self.norm2(self.conv1(F.silu(self.norm1(x)))) * (1 + scale) + shift
            return self.short(x) + self.conv2(F.silu(h))

    class Attention(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, width)
            self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

        def forward(self, x: Tensor) -> Tensor:
            n, c, h, w = x.shape
            q, k, v = self.qkv(self.norm(x)).view(n, 3, 2, c // 2, h * w).transpose(3, 4).unbind(1)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(n, c, h, w)
            return x + self.out(mixed)

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
            self.enter, self.down1, self.down2 = nn.Conv2d(3, 8, 3, 1, 1), Res(8, 8), Res(8, 16)
            self.small = nn.Conv2d(8, 8, 3, 2, 1)
            self.middle = Attention(16)
            self.grow = nn.ConvTranspose2d(16, 8, 2, 2)
            self.up, self.leave = Res(16, 8), nn.Conv2d(8, 3, 3, 1, 1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            t = self.time(sinusoids(t, 8))
            one = self.down1(self.enter(x), t)
            two = self.middle(self.down2(self.small(one), t))
            return self.leave(self.up(torch.cat([one, self.grow(two)], 1), t))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, noise, t = batch
        level = t.cos().view(-1, 1, 1, 1)
        found = model(level * x + (1 - level**2).sqrt() * noise, t)
        return (found - noise).square().flatten(1).mean(1)

    return UNet(), loss_fn, (numbers(3, 8, 8), numbers(3, 8, 8), torch.rand(EXAMPLES))


@architecture
def dit() -> Built:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(16, elementwise_affine=False) for _ in range(2))
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU("tanh"), nn.Linear(24, 16))
            self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(16, 96))

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            a, b, g, d, e, f = self.modulate(c).unsqueeze(1).chunk(6, 2)
            h = self.norms[0](x) * (1 + a) + b
            x = x + g * self.attention(h, h, h, need_weights=False)[0]
            return x + f * self.mlp(self.norms[1](x) * (1 + d) + e)

    class DiT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.positions = nn.Conv2d(3, 16, 2, 2), nn.Parameter(torch.randn(16, 16))
            self.time, self.label = nn.Linear(8, 16), nn.Embedding(CLASSES, 16)
            self.layers, self.leave = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(16, 12)

        def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            h = self.patches(x).flatten(2).transpose(1, 2) + self.positions
            for layer in self.layers:
                h = layer(h, self.time(sinusoids(t, 8)) + self.label(y))
            h = self.leave(h).view(-1, 4, 4, 2, 2, 3)
            return torch.einsum("nhwpqc->nchpwq", h).reshape(x.shape)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, noise, t, y = batch
        found = model(x * t.view(-1, 1, 1, 1) + noise, t, y)
        return (found - noise).square().flatten(1).mean(1)

    return DiT(), loss_fn, (numbers(3, 8, 8), numbers(3, 8, 8), torch.rand(EXAMPLES), classes())


@architecture
def wavenet() -> Built:
    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Embedding(WORDS, 8)
            self.gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
            self.skips = nn.ModuleList(nn.Conv1d(8, 16, 1) for _ in range(3))
            self.leave = nn.Sequential(nn.ReLU(), nn.Conv1d(8, WORDS, 1))

        def forward(self, ids: Tensor) -> Tensor:
            x, total = self.enter(ids).transpose(1, 2), 0.0
            for i, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
                a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
                own, out = skip(a.tanh() * b.sigmoid()).chunk(2, 1)
                x, total = x + own, total + out
            return self.leave(total)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        (ids,) = batch
        return F.cross_entropy(model(ids)[..., :-1], ids[:, 1:], reduction="none").mean(1)

    return WaveNet(), loss_fn, (words(12),)


@architecture
def tcn() -> Built:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., :-2].contiguous()

    layers: list[nn.Module] = []
    for i, (a, b) in enumerate([(3, 8), (8, 8)]):
        conv = nn.Conv1d(a, b, 3, padding=2 * 2**i, dilation=2**i)
        layers += [parametrizations.weight_norm(conv), Cut(), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    return model, cross_entropy, (numbers(3, 12), classes())


@architecture
def conv3d() -> Built:
    model = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool3d(2),
        nn.ConvTranspose3d(4, 2, 2, 2), nn.Upsample(scale_factor=0.5, mode="trilinear"),
        nn.Flatten(), nn.LazyLinear(CLASSES),
    )  # fmt: skip
    batch = numbers(1, 4, 8, 8), classes()
    with torch.no_grad():
        model(batch[0])
    return model, cross_entropy, batch


# Sequences ----------------------------------------------------------------------------------------


def _recurrent(cell: type[nn.RNNBase], **options: Any) -> Callable[[], Built]:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Embedding(WORDS, 8)
            self.body = cell(8, 12, batch_first=True, **options)
            self.head = nn.LazyLinear(CLASSES)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(self.enter(ids))[0].mean(1))

    def build() -> Built:
        model, ids = Recurrent(), words()
        with torch.no_grad():
            model(ids)
        return model, cross_entropy, (ids, classes())

    return build


_add("lstm", _recurrent(nn.LSTM, num_layers=2))
_add("lstm_projected", _recurrent(nn.LSTM, proj_size=6))
_add("bilstm", _recurrent(nn.LSTM, bidirectional=True))
_add("gru", _recurrent(nn.GRU, num_layers=2))
_add("rnn", _recurrent(nn.RNN, nonlinearity="relu"))


@architecture
def conv_lstm() -> Built:
    class ConvLSTM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates, self.top = nn.Conv2d(3 + 4, 16, 3, 1, 1), top(4)
            self.peephole = nn.Parameter(torch.randn(3, 4, 6, 6))

        def forward(self, x: Tensor) -> Tensor:
            h = c = x.new_zeros(len(x), 4, 6, 6)
            for step in x.unbind(1):
                i, f, g, o = self.gates(torch.cat([step, h], 1)).chunk(4, 1)
                i = (i + self.peephole[0] * c).sigmoid()
                c = (f + self.peephole[1] * c).sigmoid() * c + i * g.tanh()
                h = (o + self.peephole[2] * c).sigmoid() * c.tanh()
            return self.top(h)

    return ConvLSTM(), cross_entropy, (numbers(3, 3, 6, 6), classes())


@architecture
def lstm_cells_with_attention() -> Built:
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.cell = nn.Embedding(WORDS, 8), nn.LSTMCell(16, 8)
            self.start = nn.Parameter(torch.randn(8))
            self.match, self.head = nn.Bilinear(8, 8, 1, bias=False), nn.Linear(8, CLASSES)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.enter(ids)
            h, c = self.start.expand(len(x), -1), x.new_zeros(len(x), 8)
            for t in range(x.shape[1]):
                scores = self.match(x, h.unsqueeze(1).expand_as(x).contiguous()).softmax(1)
                h, c = self.cell(torch.cat([x[:, t], (scores * x).sum(1)], 1), (h, c))
            return self.head(h)

    return Attentive(), cross_entropy, (words(), classes())


@architecture
def transformer() -> Built:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Embedding(WORDS, 16, padding_idx=0)
            self.positions = nn.Embedding(32, 16)
            self.body = nn.Transformer(16, 2, 2, 2, 24, 0.0, batch_first=True)
            self.head = nn.Linear(16, WORDS, bias=False)
            self.head.weight = self.enter.weight

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            def embedded(ids: Tensor) -> Tensor:
                return self.enter(ids) * 4 + self.positions(torch.arange(ids.shape[1]))

            later = nn.Transformer.generate_square_subsequent_mask(
                target.shape[1], dtype=self.head.weight.dtype
            )
            found = self.body(
                embedded(source), embedded(target), tgt_mask=later,
                src_key_padding_mask=source == 0, memory_key_padding_mask=source == 0,
            )  # fmt: skip
            return self.head(found)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        source, target = batch
        logits = model(source, target[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), target[:, 1:], reduction="none").mean(1)

    return Translate(), loss_fn, (words() * kept(), words())


@architecture
def attention_bias_kv() -> Built:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.MultiheadAttention(
                8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True
            )
            self.two = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Any) -> Tensor:
            x, memory, mask = x
            x = x + self.one(x, x, x, key_padding_mask=mask == 0)[0]
            return self.head((x + self.two(x, memory, memory)[0]).mean(1))

    return Attention(), cross_entropy, ((numbers(LENGTH, 8), numbers(4, 6), kept()), classes())


@architecture
def perceiver() -> Built:
    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents, self.places = nn.Parameter(torch.randn(4, 16)), nn.Parameter(
                torch.randn(12, 8)
            )  # fmt: skip
            self.cross = nn.MultiheadAttention(16, 1, kdim=8, vdim=8, batch_first=True)
            self.own = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)
            self.query, self.out = nn.Parameter(torch.randn(1, 1, 16)), nn.MultiheadAttention(
                16, 2, batch_first=True
            )  # fmt: skip
            self.head = nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.places
            z = self.latents.expand(len(x), -1, -1)
            for _ in range(2):
                z = self.own(z + self.cross(z, x, x, need_weights=False)[0])
            q = self.query.repeat(len(x), 1, 1)
            return self.head(self.out(q, z, z, need_weights=False)[0].squeeze(1))

    return Perceiver(), cross_entropy, (numbers(12, 8), classes())


@architecture
def mlp_mixer() -> Built:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
            self.tokens = nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 9))
            self.channels = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.scale * self.channels(self.norm2(x))

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.body = nn.Conv2d(3, 16, 4, 4), nn.Sequential(Mix(), Mix())
            self.head = nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.enter(x).flatten(2).transpose(1, 2)).mean(1))

    return Mixer(), cross_entropy, picture()


@architecture
def gated_mlp_einsum() -> Built:
    """A decoder written by hand with einsum and RMS norms, as in research code."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Parameter(torch.randn(2, 16, 8)), nn.Parameter(
                torch.randn(2, 16, 8)
            )  # fmt: skip
            self.v, self.o = nn.Parameter(torch.randn(2, 16, 8)), nn.Parameter(
                torch.randn(2, 8, 16)
            )  # fmt: skip
            self.gate, self.up = nn.Parameter(torch.randn(16, 24)), nn.Parameter(
                torch.randn(16, 24)
            )  # fmt: skip
            self.down, self.scale = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.ones(16))

        def norm(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            q, k, v = (torch.einsum("ntd,hde->nhte", h, w) for w in (self.q, self.k, self.v))
            scores = torch.einsum("nhte,nhse->nhts", q, k) / 8
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            mixed = torch.einsum("nhts,nhse->nhte", scores.masked_fill(later, -1e9).softmax(-1), v)
            x = x + 0.1 * torch.einsum("nhte,hed->ntd", mixed, self.o)
            h = self.norm(x)
            return x + 0.1 * (F.silu(h @ self.gate) * (h @ self.up)) @ self.down

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(WORDS, 16))
            self.positions = nn.Parameter(torch.randn(32, 16))
            self.layers = nn.Sequential(Layer(), Layer())

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table[ids] + self.positions[: ids.shape[1]]
            return self.layers(x) @ self.table.T

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        (ids,) = batch
        logits = model(ids)[:, :-1]
        return -logits.log_softmax(-1).gather(2, ids[:, 1:, None]).mean((1, 2))

    return Decoder(), loss_fn, (words(),)


@architecture
def mixture_of_experts() -> Built:
    """Soft and hard routing over experts whose weights are one tensor, without sparse products."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.up = nn.Parameter(torch.randn(4, 8, 12))
            self.down = nn.Parameter(torch.randn(4, 12, 8))
            self.bias = nn.Parameter(torch.randn(4, 12))
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(2, -1)
            gates = torch.zeros(*x.shape[:2], 4, dtype=x.dtype).scatter(2, chosen, weights)
            h = torch.einsum("ntd,edh->nteh", x, self.up) + self.bias
            out = torch.einsum("nteh,ehd,nte->ntd", h.relu(), self.down, gates)
            return self.head((x + out).mean(1))

    return Experts(), cross_entropy, (numbers(LENGTH, 8), classes())


# Weights that are computed, and other training code -----------------------------------------------


class Int8LoRA(nn.Module):
    """A frozen weight of 8-bit integers, dequantized in `forward`, with a trained correction."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (b, a), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(b, 1) / 127)
        self.down, self.up = nn.Parameter(torch.randn(2, a)), nn.Parameter(torch.randn(b, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale
        return F.linear(x, weight) + F.linear(F.linear(x, self.down), self.up) * 2


@architecture
def quantized_lora() -> Built:
    model = nn.Sequential(Int8LoRA(6, 12), nn.GELU(), Int8LoRA(12, CLASSES))
    return model, cross_entropy, (numbers(6), classes())


@architecture
def merged_lora() -> Built:
    """The correction is added to the frozen weight before it is used."""

    class Merged(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.base = nn.Linear(a, b).requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, a)), nn.Parameter(torch.randn(b, 2))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)

    model = nn.Sequential(Merged(6, 12), nn.Tanh(), Merged(12, CLASSES))
    return model, cross_entropy, (numbers(5, 6).mean(1), classes())


@architecture
def weight_norm() -> Built:
    layers = [parametrizations.weight_norm(nn.Linear(a, b)) for a, b in ((6, 12), (12, CLASSES))]
    model = nn.Sequential(layers[0], nn.ELU(), layers[1])
    return model, cross_entropy, (numbers(6), classes())


@architecture
def spectral_norm() -> Built:
    one = parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))
    two = parametrizations.spectral_norm(nn.Linear(8, CLASSES))
    model = nn.Sequential(one, nn.LeakyReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), two)
    return model.eval(), cross_entropy, picture()


@architecture
def orthogonal() -> Built:
    one = parametrizations.orthogonal(nn.Linear(6, 6, bias=False), use_trivialization=False)
    model = nn.Sequential(one, nn.Tanh(), nn.Linear(6, CLASSES))
    return model, cross_entropy, (numbers(6), classes())


@architecture
def tied_autoencoder() -> Built:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.ParameterList([torch.randn(8, 12), torch.randn(4, 8)])
            self.up, self.down = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(12))

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.weight
            h = (x @ a.T).tanh() @ b.T + self.up
            return F.linear(F.linear(h, b.t()).tanh(), a.t(), self.down)

    return Tied(), reconstruction, (numbers(12),)


@architecture
def variational_autoencoder() -> Built:
    """The noise is an input, so that sums can be compared."""

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten())
            self.code = nn.Linear(64, 8)
            self.leave = nn.Sequential(
                nn.Linear(4, 64), nn.ReLU(), nn.Unflatten(1, (4, 4, 4)),
                nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Sigmoid(),
            )  # fmt: skip

        def forward(self, x: Tensor, noise: Tensor) -> Any:
            mean, spread = self.code(self.enter(x)).chunk(2, 1)
            return mean, spread, self.leave(mean + (spread / 2).exp() * noise)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, noise = batch
        mean, spread, found = model(x, noise)
        divergence = (mean.square() + spread.exp() - 1 - spread).sum(1) / 2
        return F.binary_cross_entropy(found, x, reduction="none").flatten(1).sum(1) + divergence

    return VAE(), loss_fn, (torch.rand(EXAMPLES, 1, 8, 8), numbers(4))


@architecture
def hypernetwork() -> Built:
    """The weights of a layer are made from each example, and others from a learned code."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.code = nn.Linear(4, 6 * 8), nn.Parameter(torch.randn(4))
            self.shared, self.head = nn.Linear(4, 8 * 8), nn.Linear(8, CLASSES)

        def forward(self, x: Any) -> Tensor:
            x, task = x
            own = self.make(task).view(-1, 6, 8)
            h = torch.bmm(x.unsqueeze(1), own).squeeze(1).relu()
            return self.head(F.linear(h, self.shared(self.code).view(8, 8)).tanh())

    return Hyper(), cross_entropy, ((numbers(6), numbers(4)), classes())


@architecture
def neural_ode() -> Built:
    class ODE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 6))
            self.head = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            def slope(t: float, h: Tensor) -> Tensor:
                return self.field(torch.cat([h, torch.full_like(h[:, :1], t)], 1))

            for t in (0.0, 0.5):  # Runge-Kutta of the fourth order
                a = slope(t, x)
                b = slope(t + 0.25, x + 0.25 * a)
                c = slope(t + 0.25, x + 0.25 * b)
                d = slope(t + 0.5, x + 0.5 * c)
                x = x + (a + 2 * b + 2 * c + d) / 12
            return self.head(x)

    return ODE(), cross_entropy, (numbers(6), classes())


@architecture
def physics_informed() -> Built:
    """The loss holds the derivative of the network with respect to its input."""
    model = nn.Sequential(
        nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)
    )

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        (x,) = batch
        x = x.detach().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (slope[:, 0] + u.squeeze(1) * slope[:, 1]).square()

    return model, loss_fn, (numbers(2),)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * g, None


@architecture
def domain_adversarial() -> Built:
    """A gradient is reversed by a custom `autograd.Function`."""

    class DANN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
            self.label, self.domain = nn.Linear(12, CLASSES), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return self.label(h), self.domain(_Reversed.apply(h, 0.5))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y, d = batch
        label, domain = model(x)
        return F.cross_entropy(label, y, reduction="none") + F.cross_entropy(
            domain, d, reduction="none"
        )

    return DANN(), loss_fn, (numbers(6), classes(), classes() % 2)


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sign(), x.abs().mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor, of_mean: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1) + of_mean * x.sign() / x.numel()


@architecture
def binarized() -> Built:
    """Signs of weights and of activations, with a straight-through gradient."""

    class Binary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            sign, scale = _Sign.apply(self.weight)
            return F.linear(_Sign.apply(x)[0], sign, self.bias) * scale

    model = nn.Sequential(Binary(6, 12), nn.LayerNorm(12), Binary(12, CLASSES))
    return model, cross_entropy, (numbers(6), classes())


@architecture
def vector_quantized() -> Built:
    class VQ(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(8, 6), nn.Linear(6, 8)
            self.codes = nn.Embedding(10, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.enter(x).view(-1, 2, 3)
            distances = (z.unsqueeze(2) - self.codes.weight).square().sum(-1)
            q = self.codes(distances.argmin(-1))
            cost = (q - z.detach()).square() + 0.25 * (q.detach() - z).square()
            passed = z + (q - z).detach()  # straight through
            return self.leave(passed.flatten(1)), cost.mean((1, 2))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        (x,) = batch
        found, cost = model(x)
        return (found - x).square().mean(1) + cost

    return VQ(), loss_fn, (numbers(8),)


@architecture
def siamese() -> Built:
    body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        one, two, is_same = batch
        near = F.cosine_similarity(model(one), model(two))
        return F.binary_cross_entropy_with_logits(5 * near, is_same, reduction="none")

    return body, loss_fn, (numbers(6), numbers(6), torch.rand(EXAMPLES).round())


@dataclasses.dataclass
class Record:
    """A batch whose fields are read by name."""

    x: Tensor
    y: Tensor
    name: ClassVar[str] = "numbers"  # of the class: no value of a record


@architecture
def dataclass_batch() -> Built:
    model = nn.Sequential(nn.Linear(6, 12), nn.RMSNorm(12), nn.Softplus(), nn.Linear(12, 1))

    def loss_fn(model: nn.Module, batch: Record) -> Tensor:
        return F.poisson_nll_loss(model(batch.x).squeeze(1), batch.y, reduction="none")

    return model, loss_fn, Record(numbers(6), torch.randint(5, (EXAMPLES,)).float())


@architecture
def checkpointed_blocks() -> Built:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.head = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + checkpoint(lambda h, b=block: b(h).tanh(), x, use_reentrant=False)
            return self.head(x)

    return Checkpointed(), cross_entropy, (numbers(6), classes())


@architecture
def frozen_backbone() -> Built:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    body.requires_grad_(False)
    return nn.Sequential(body, nn.Linear(32, CLASSES)), cross_entropy, picture()


@architecture
def factorization_machine() -> Built:
    class FM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factors = nn.Embedding(WORDS, 1), nn.Embedding(WORDS, 4)
            self.offset = nn.Parameter(torch.zeros(()))

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.factors(ids)
            pairs = (rows.sum(1).square() - rows.square().sum(1)).sum(1) / 2
            return self.offset + self.linear(ids).sum((1, 2)) + pairs

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        ids, y = batch
        return F.binary_cross_entropy_with_logits(model(ids), y, reduction="none")

    return FM(), loss_fn, (words(4), torch.rand(EXAMPLES).round())


@architecture
def kolmogorov_arnold() -> Built:
    class KAN(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.base, self.spline = nn.Linear(a, b), nn.Parameter(torch.randn(b, a, 5))
            self.register_buffer("knots", torch.linspace(-2, 2, 5))

        def forward(self, x: Tensor) -> Tensor:
            bumps = torch.exp(-((x.unsqueeze(-1) - self.knots) ** 2))
            return self.base(F.silu(x)) + torch.einsum("nik,oik->no", bumps, self.spline)

    return nn.Sequential(KAN(4, 6), KAN(6, CLASSES)), cross_entropy, (numbers(4), classes())
