"""A target's tokenizer and context without its weights, so that data can be prepared on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(where: str) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer of a target, and its context in tokens where its config says one.

    Args:
        where: `tiny`, a target folder, or a Hub id.

    Raises:
        ConfigError: no such folder or Hub id, or no tokenizer there.
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
            f"target.path={where}: no tokenizer and config.json could be read ({reason}); pass a target "
            f"folder, or a Hub id while online"
        ) from error
    return tokenizer, context
