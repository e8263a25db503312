"""A small byte-level BPE tokenizer from scratch: digits apart, special tokens, a chat template with marks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from longtrain.errors import ConfigError, DataError

SPECIALS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Ids 0..3: document start and padding, user turn, assistant turn, end of the assistant's answer (EOS)."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A system message is read as a user turn; the generation marks cover the answer and its end token."""


def train_tokenizer(
    texts: Iterable[str], folder: Path, *, size: int = 4096, max_positions: int = 16384
) -> None:
    """Train a byte-level BPE and write it as a Hugging Face tokenizer folder.

    Every digit is its own token, so a number of seven digits is seven tokens; every byte is in the alphabet,
    so no text is unknown and decoding gives back the input.

    Args:
        texts: documents to learn merges from; a few MB are enough for a few thousand entries.
        folder: where `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` go; made if missing.
        size: entries in all, special tokens and the 256 bytes included.
        max_positions: the model's context, tokens.

    Raises:
        ConfigError: the size leaves no room for merges.
        DataError: the texts are too few to fill the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size <= 256 + len(SPECIALS):
        raise ConfigError(f"tokenizer size {size} is too small; allowed: more than {256 + len(SPECIALS)}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() != size:
        raise DataError(
            f"the texts give a vocabulary of {bpe.get_vocab_size()}, {size} were asked for; "
            "give more text or a smaller method.vocab_size"
        )
    save_tokenizer(bpe.to_str(), folder, max_positions=max_positions)


def save_tokenizer(tokenizer_json: str, folder: Path, *, max_positions: int) -> None:
    """Write the three files by which `AutoTokenizer` finds a tokenizer of this kind."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "pad_token": SPECIALS[0],
        "eos_token": SPECIALS[3],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
