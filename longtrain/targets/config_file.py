"""Reads and checks a target's config.json and generation_config.json before transformers uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longtrain.errors import ArtifactError, refusal
from longtrain.files import impossible_number, read_json
from longtrain.log import get_logger
from longtrain.targets.families import refuse_missing

log = get_logger(__name__)

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
MOST = {"num_hidden_layers": 2**12}
"""Largest allowed sizes; 2**31 for other keys."""


def read_config(folder: Path) -> Any:
    """Read the transformers config of a target folder.

    Raises:
        ArtifactError: there is none, or it describes no model.
        TargetMismatchError: transformers cannot read it, and longtrain would not serve the family either.
    """
    from transformers import AutoConfig  # which costs seconds that `read_object` does without

    file = folder / "config.json"
    values = read_object(file, "pass a target folder (config.json, weights, tokenizer)")
    if wrong := impossible_number(values):
        raise ArtifactError(f"{file} has {wrong}; get the folder again")
    for key in SIZES:
        size, most = values.get(key), MOST.get(key, 2**31)
        if size is not None and (type(size) is not int or not 0 < size <= most):
            raise refusal(ArtifactError, f"{file} has {key}={size!r}", f"a whole number from 1 to {most}")
    _check_heads(values, file)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        refuse_missing(str(folder), values)
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ArtifactError(f"{file} is not a config that transformers can read ({reason})") from error


def _check_heads(values: dict[str, Any], file: Path) -> None:
    """Refuse impossible head counts and sizes, before transformers fails at the first forward."""
    hidden, heads, kv_heads, head_dim = (
        values.get(key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads and kv_heads and heads % kv_heads:
        said, allowed = f"num_key_value_heads={kv_heads}", f"a divisor of num_attention_heads={heads}"
    elif heads and hidden and not head_dim and hidden % heads:
        said, allowed = f"hidden_size={hidden}", f"multiples of num_attention_heads={heads}, or a head_dim"
    elif head_dim and head_dim % 2:
        said, allowed = f"head_dim={head_dim}", "even numbers, since RoPE turns pairs"
    else:
        return
    raise refusal(ArtifactError, f"{file} has {said}", allowed)


def read_object(file: Path, advice: str = "get the folder again") -> dict[str, Any]:
    """Read the keys and values of a JSON file.

    Raises:
        ArtifactError: there is no such file, or it is not one JSON object.
    """
    if not file.exists():
        raise ArtifactError(f"{file.parent} has no {file.name}; {advice}")
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} is not JSON ({error}); {advice}") from error
    if not isinstance(values, dict):
        raise ArtifactError(f"{file} holds a JSON {type(values).__name__}, not an object; {advice}")
    return values


def eos_ids_of(config: Any, folder: Path | None) -> tuple[int, ...]:
    """Return the end-of-sequence ids: the generation config's, which chat models extend, else the config's.

    Ids beyond the vocabulary, which some configs name, are left out: the model cannot generate them.

    Raises:
        ArtifactError: the generation config cannot be read, or they are no ids.
    """
    eos, file = config.eos_token_id, folder / "generation_config.json" if folder else None
    if file is not None and file.exists():
        eos = read_object(file).get("eos_token_id", eos)
    if eos is None:
        return ()
    ids = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    if not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        where = file or "the config"
        raise ArtifactError(f"{where} has eos_token_id={eos!r}; allowed: a token id, or a list of them")
    known = tuple(one for one in ids if one < config.vocab_size)
    if known != ids:
        log.warning("end_ids_left_out=%s vocab_size=%d", sorted({*ids} - {*known}), config.vocab_size)
    return known
