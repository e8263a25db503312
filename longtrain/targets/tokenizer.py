"""Loads tokenizers of targets without the weights, replaces chat templates, and trains a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.assets import asset_dir
from longtrain.data.retrieval.wording import KEY, PRETRAIN
from longtrain.errors import ConfigError, DataError, first_line, is_failure, refusal
from longtrain.files import LARGEST, read_json, read_text
from longtrain.targets.at_hand import folder_of, is_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
"""Chat template: system messages are user turns; the generation marks cover answer and end token."""

CHAT_BY_DEFAULT = "chat_by_default"
"""Key of `tokenizer_config.json`: True if a typed prompt is a user's message by default.

Without it, models with a chat template count as chat models.
"""


class GrowingText:
    """Decodes tokens one by one to text, in whole characters only.

    Args:
        tokenizer: the target's tokenizer; special tokens are rendered as text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._read = 0

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty if the token ends inside a character."""
        self._ids.append(token)
        known, text = self._decode(self._start, self._read), self._decode(self._start, None)
        if text.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def _decode(self, start: int, stop: int | None) -> str:
        return str(self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=False))


def chats(tokenizer: Any) -> bool:
    """Return True for a chat model: it has a template, and its files do not say that it continues text."""
    if tokenizer is None or not tokenizer.chat_template:
        return False
    return bool(tokenizer.init_kwargs.get(CHAT_BY_DEFAULT, True))


def words_of(pieces: Iterable[str]) -> list[tuple[str, range]]:
    """Join pieces of a text to words, each with the range of its pieces."""
    found: list[tuple[str, range]] = []
    for at, piece in enumerate(pieces):
        text, places = found[-1] if found else (" ", range(0))
        if piece[:1].isspace() or text[-1:].isspace():
            found.append((piece, range(at, at + 1)))
        else:
            found[-1] = (text + piece, range(places.start, at + 1))
    return found


def read_tokenizer(
    where: str, *, chat_template: str | None = None, max_positions: int | None = None
) -> tuple[PreTrainedTokenizerBase, int | None]:
    """Return the tokenizer of a target, and its context in tokens if its config states one.

    Args:
        where: `tiny`, a target folder, a `.gguf` file, or a Hub id.
        chat_template: replaces the tokenizer's own; see `set_chat_template`.
        max_positions: replaces the config's context.

    Raises:
        ConfigError: no such folder or Hub id, no tokenizer there, or no such template.
    """
    from transformers import AutoTokenizer

    folder = _folder(where)
    place = folder if folder.is_dir() else where
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        context = read_json(_config_file(where)).get("max_position_embeddings")
        if context is not None and (type(context) is not int or not 0 < context < LARGEST):
            raise ValueError(f"config.json has max_position_embeddings={context!r}, which is no length")
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigError(
            f"target.path={where}: no tokenizer and config.json could be read ({first_line(error)}); "
            f"{legacy_hint(error) or 'pass a target folder, or a Hub id while online'}"
        ) from error
    set_chat_template(keep_spaces(tokenizer), chat_template)
    return tokenizer, max_positions or context


def keep_spaces(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Make a byte-pair tokenizer decode to exactly the text that was encoded, and return it.

    Many published folders enable the removal of spaces before punctuation that was made for BERT's pieces.
    For byte pairs transformers skips it and warns at each load; disabling it here avoids the warning.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ == "BPE":
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def embedded_tokens(where: str) -> int | None:
    """Return the number of tokens that a target has embeddings for, or None if its config does not state it.

    A tokenizer with added tokens may know more.

    Args:
        where: as for `read_tokenizer`, which is called first.
    """
    size = read_json(_config_file(where)).get("vocab_size")
    return size if type(size) is int and size > 0 else None


def _folder(where: str) -> Path:
    known = where == "tiny" or is_gguf(where)
    return folder_of(where) if known else Path(where).expanduser()


def _config_file(where: str) -> Path:
    """Return the path of a target's config, downloaded if it is on the Hub."""
    from huggingface_hub import hf_hub_download

    folder = _folder(where)
    return folder / "config.json" if folder.is_dir() else Path(hf_hub_download(where, "config.json"))


def set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    """Replace a tokenizer's chat template.

    Args:
        tokenizer: changed in place.
        chat_template: the name of a bundled one (`conf/target/templates`) or a file; None keeps its own.

    Raises:
        ConfigError: no such template.
    """
    if chat_template is None:
        return
    folder = asset_dir("conf") / "target" / "templates"
    bundled = {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    file = bundled.get(chat_template) or Path(chat_template).expanduser()
    try:
        tokenizer.chat_template = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(
            ConfigError,
            f"target.chat_template={chat_template} is no file that can be read",
            f"a .jinja file, {', '.join(bundled)}, or null (the tokenizer's own)",
        ) from error


def legacy_hint(error: BaseException) -> str:
    """Return what to install if a tokenizer needed sentencepiece or protobuf to be read; else empty."""
    lacking = [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]
    if not any(word in str(error).lower() for word in ("sentencepiece", "protobuf", "tiktoken")):
        return ""
    if not lacking:
        return ""
    return f"it needs {' and '.join(lacking)}: pip install 'longtrain[legacy]'"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


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
        raise refusal(ConfigError, f"tokenizer size {size} is too small", f"more than {256 + len(SPECIALS)}")
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
    """Write the three files from which `AutoTokenizer` loads a tokenizer of this kind."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "pad_token": SPECIALS[0],
        "eos_token": SPECIALS[3],
        CHAT_BY_DEFAULT: False,  # continues text by default, with a template for questions
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        KEY: PRETRAIN.name,
    }
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
