"""A target's tokenizer and context without its weights, so that data can be prepared on any machine."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(
    where: str, *, chat_template: str | None = None, max_positions: int | None = None
) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer of a target, and its context in tokens where its config says one.

    Args:
        where: `tiny`, a target folder, or a Hub id.
        chat_template: over the tokenizer's own; see `set_chat_template`.
        max_positions: the context, over the config's.

    Raises:
        ConfigError: no such folder or Hub id, no tokenizer there, or no such template.
    """
    from huggingface_hub import hf_hub_download
    from transformers import AutoTokenizer

    folder = asset_dir("bundled") / "tiny" if where == "tiny" else Path(where).expanduser()
    local = folder.is_dir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if local else where, trust_remote_code=False)
        config = folder / "config.json" if local else Path(hf_hub_download(where, "config.json"))
        context = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings")
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"target.path={where}: no tokenizer and config.json could be read ({reason}); "
            f"{legacy_hint(error) or 'pass a target folder, or a Hub id while online'}"
        ) from error
    set_chat_template(tokenizer, chat_template)
    return tokenizer, max_positions or context


def set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    """Give a tokenizer another chat template.

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
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"target.chat_template={chat_template} is no file that can be read; allowed: a .jinja file, "
            f"{', '.join(bundled)}, or null (the tokenizer's own)"
        ) from error


def legacy_hint(error: Exception) -> str:
    """What to install if a tokenizer could not be read for want of sentencepiece or protobuf; else empty."""
    lacking = [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]
    if not any(word in str(error).lower() for word in ("sentencepiece", "protobuf", "tiktoken")):
        return ""
    if not lacking:
        return ""
    return f"it needs {' and '.join(lacking)}: pip install 'longtrain[legacy]'"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
