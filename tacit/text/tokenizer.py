"""Tokenizers: one from a local folder, or one trained on text that is declared public.

A vocabulary is a function of the text it was made from: a word that only one record holds shows up
in it. So a tokenizer is never trained on the private records, and nothing here reads them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tacit._check import whole

Tokenizer = Any  # Any: a tokenizer of transformers, which is imported on use
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def train_tokenizer(public: Iterable[str], *, size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of at most `size` tokens, trained on public texts only.

    Every text can be encoded, since single bytes are tokens.
    """
    import tokenizers as tok  # pyright: ignore[reportMissingImports]  # of the extra `text`
    from transformers import (  # pyright: ignore[reportMissingImports]  # likewise
        PreTrainedTokenizerFast,
    )

    alphabet = tok.pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(_SPECIAL)
    whole(size=size, least=least)
    tokenizer = tok.Tokenizer(tok.models.BPE(unk_token=_SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = tok.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = tok.decoders.ByteLevel()
    trainer = tok.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(public, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL)


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a local folder, with a token for padding and one for the end.

    The end is the token that separates texts where there is no other, as in BERT.
    """
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]  # of `text`

    try:
        found = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        knows_letters = bool(found("tacit", add_special_tokens=False)["input_ids"])
    except Exception as wrong:  # the libraries below raise what they like
        missing = isinstance(wrong, ImportError) and "sentencepiece" in str(wrong)
        also = " It needs the package sentencepiece." if missing else ""
        raise ValueError(
            f"language_model.tokenizer: there is no tokenizer that can be read in {folder}.{also}"
        ) from None
    if not knows_letters:  # what is made of a folder without the files of a vocabulary
        raise ValueError(f"language_model.tokenizer: the tokenizer in {folder} has no vocabulary.")
    if found.eos_token_id is None:
        if found.sep_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token (eos_token): give it one.")
        found.eos_token = found.sep_token
    if found.pad_token_id is None:  # as in GPT-2: padding is never looked at nor counted
        found.pad_token = found.eos_token
    return found
