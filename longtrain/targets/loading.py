"""Loads targets from a folder or the Hub, or builds them of a shape with random weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from longtrain.cache.room import GIB, NoRoomError, free_bytes
from longtrain.costs.footprint import Spread, held, refuse_lack
from longtrain.costs.model import Sizes
from longtrain.errors import ArtifactError, ConfigError, first_line, is_failure, refusal
from longtrain.layers import shapes_alone
from longtrain.log import get_logger
from longtrain.targets.at_hand import folder_of, source_of
from longtrain.targets.attention import NAME
from longtrain.targets.config_file import eos_ids_of, read_config
from longtrain.targets.ends import TargetEnds, Weights, assign_ends, drawn_weights
from longtrain.targets.families.facts import model_facts
from longtrain.targets.info import TargetInfo, check_supported
from longtrain.targets.model import Target
from longtrain.targets.shapes import shape_config
from longtrain.targets.sharded import Node, Shards
from longtrain.targets.stored.checkpoint import StoredWeights
from longtrain.targets.stored.foreign import foreign_ends, runs_here
from longtrain.targets.tokenizer import keep_spaces, legacy_hint, set_chat_template
from longtrain.targets.weights import (
    assign_weights,
    draw,
    gathered,
    identity,
    random_weights,
    rebuild_buffers,
    sampled,
    stored_values,
)

log = get_logger(__name__)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_PROBE = "The quick brown fox, 1234567 jumps:\n\tif x != y { return größe; } 龙 🙂"


def load_target(
    where: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    max_positions: int | None = None,
    chat_template: str | None = None,
    weights: Literal["stored", "random"] = "stored",
    seed: int = 0,
    shard: Literal["fsdp2"] | None = None,
    layers: bool = True,
) -> Target:
    """Load a frozen target.

    With random weights a folder of `config.json` and tokenizer files is enough, to measure training against a
    model that is not available. One of Llama 3.3 70B's shape, with the bundled tokenizer, is made in Python
    by:

        shape_config("llama33_70b").save_pretrained(folder)
        for file in (asset_dir("bundled") / "tiny").glob("*token*"):
            shutil.copy(file, folder)
        shutil.copy(asset_dir("bundled") / "tiny" / "chat_template.jinja", folder)

    Args:
        where: "tiny" (the bundled one), a folder with `config.json`, weights and tokenizer, a `.gguf` file,
            or a Hub id.
        dtype: dtype of weights and activations; "auto" is bf16 on a GPU and fp32 elsewhere.
        device: the device to put it on.
        max_positions: context in tokens, if it should differ from the config's (before linear RoPE scaling).
        chat_template: replaces the tokenizer's own: the name of a bundled one, or a file.
        weights: "stored", or "random" ones, which the target's name then mentions.
        seed: seed of random weights; they are the same on one kind of device only, sharded or not.
        shard: "fsdp2": split the layers over this machine's ranks (`longtrain.targets.sharded`).
        layers: False reads (or draws) the weights of the layers for the target's hash and keeps none of them;
            the target can then embed, rotate and give logits, but not run (`longtrain.targets.ends`). So may
            a target of any architecture, or with a part of its files (`longtrain.targets.stored.foreign`).

    Raises:
        ConfigError: no such folder, Hub id or chat template, an unknown dtype or device, a target that the
            device has no room for, or `shard` without other ranks.
        ArtifactError: a file of the folder is missing or damaged.
        TargetMismatchError: the attention is not supported, or weights do not fit the config.
    """
    device = _device(device)
    dtype = _dtype(dtype, device)
    folder = folder_of(where)
    config = read_config(folder)
    foreign = False
    if not layers and weights == "stored":
        foreign = not runs_here(folder, config)
    if not foreign:
        check_supported(config, str(where))
    checkpoint = None
    if weights == "stored" and not foreign:  # missing weights are told before anything is built
        read_to = device if layers else torch.device("cpu")
        checkpoint = StoredWeights(folder, device=read_to, tied=config.tie_word_embeddings)
        config.tie_word_embeddings = checkpoint.tied
    tokenizer = _tokenizer(folder)
    set_chat_template(tokenizer, chat_template)
    if foreign:
        known: dict[str, Any] = {"name": str(where), "tokenizer_hash": _ids_hash(tokenizer)}
        known |= {"max_positions": max_positions} if max_positions else {}
        return foreign_ends(folder, config, known, tokenizer=tokenizer, dtype=dtype, device=device)
    model = _without_weights(config, dtype, str(where))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    node = None if shard is None or not layers else Node.join(device)
    if layers:
        ranks = None if node is None else node.size
        check_room(config, str(where), device, itemsize=dtype.itemsize, ranks=ranks)
    shards = None if node is None else Shards(model.model.layers, node, device)
    samples, stored, source = None, None, cast(Weights, checkpoint and checkpoint.__iter__)
    if not layers:
        if checkpoint is None:
            shapes = {name: value.shape for name, value in stored_values(model)}
            source = partial(drawn_weights, shapes, seed, dtype=dtype, device=device)
        samples = assign_ends(model, source, folder, dtype=dtype, device=device)
    elif checkpoint is not None:
        stored = assign_weights(model, checkpoint, dtype=dtype, device=device)
    else:
        random_weights(model, seed, dtype=dtype, device=device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if stored is not None:
        samples = gathered(model, stored, shards)
    rebuild_buffers(model, device)
    eos_ids = eos_ids_of(config, folder)
    name = str(where) if weights == "stored" else f"{where} (random weights)"
    info = describe(
        model,
        tokenizer=tokenizer,
        name=name,
        eos_ids=eos_ids,
        max_positions=max_positions,
        shards=shards,
        samples=samples,
    )
    source_said = source_of(folder) if weights == "stored" else {}
    info = replace(info, extra={"source": source_said} if source_said else {})
    if not layers:
        return TargetEnds(model, info, tokenizer, weights=source)
    if shards is not None:
        log.info(
            "target=%s is split over ranks=%d; gathering all layers=%d takes seconds=%.3f",
            name,
            shards.node.size,
            info.n_layers,
            shards.seconds_alone(),
        )
    return Target(model, info, tokenizer, shards=shards)


def check_room(config: Any, name: str, device: torch.device, *, itemsize: int, ranks: int | None) -> None:
    """Refuse a target whose weights do not fit into a GPU, before they are loaded.

    Args:
        config: the model's config.
        name: the target's name.
        device: the device that its weights go to; a CPU is not checked.
        itemsize: bytes of a weight.
        ranks: number of ranks that share its layers; None: it is not sharded.

    Raises:
        ConfigError: the memory footprint (`costs.held`) exceeds the GPU's memory.
    """
    if (has := device_bytes(device)) is None:
        return
    spread = Spread(devices=ranks or 1, shard=ranks is not None)
    size, tied = Sizes.of_keys(config.to_dict()), bool(config.tie_word_embeddings)
    what = held(size, spread, tied=tied, itemsize=itemsize)
    refuse_lack(what, has, f"target {name} does not fit: {device}")


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def random_target(
    shape: str | dict[str, Any],
    *,
    seed: int = 0,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Target:
    """Build a target with random weights and no tokenizer on its device (for tests and benchmarks).

    Args:
        shape: a name of `longtrain.targets.shapes.SHAPES`, or config keys with `model_type`.
        seed: seed of the weights; the same on one kind of device only.
        dtype: dtype of weights and activations.
        device: the device to build it on.

    Raises:
        ConfigError: unknown shape, dtype or device.
        NoRoomError: the weights do not fit into the free memory.
        TargetMismatchError: the attention is not supported.
    """
    device = _device(device)
    dtype = _dtype(dtype, device)
    config = shape_config(shape)
    name = shape if isinstance(shape, str) else f"random {config.model_type}"
    check_supported(config, name)
    model = _without_weights(config, dtype, name)
    needed, free = sum(param.nbytes for param in model.parameters()), free_bytes(device)
    if free is not None and needed > free:
        raise NoRoomError(
            f"random weights of {name} take {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB are free on "
            f"{device}; pass a smaller shape, or a machine with more"
        )
    model.to_empty(device=device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    rebuild_buffers(model, device)
    rng = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for leaf, value in stored_values(model):
            draw(leaf, value, rng)
    return Target(model, describe(model, tokenizer=None, name=name, eos_ids=eos_ids_of(config, None)))


def describe(
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    eos_ids: tuple[int, ...],
    max_positions: int | None = None,
    shards: Shards | None = None,
    samples: Mapping[str, tuple[torch.Size, bytes]] | None = None,
) -> TargetInfo:
    """Return the facts of a model: shapes from its config, the rest from modules and weight samples.

    `max_positions` is the context in tokens if it differs from the config's.
    """
    if samples is None:
        samples = gathered(model, sampled(model), shards)
    facts = model_facts(model, max_positions or model.config.max_position_embeddings)
    # what depends on `max_positions` is no identity of weights; dense models had no entry for experts
    apart = {"max_positions", "layers"} if facts["experts"] else {"max_positions", "layers", "experts"}
    hashed = {key: value for key, value in facts.items() if key not in apart}
    return TargetInfo(
        name=name,
        eos_ids=eos_ids,
        tokenizer_hash="" if tokenizer is None else _ids_hash(tokenizer),
        weights_hash=identity(samples, hashed),
        **facts,
    )


def _ids_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over the vocabulary and how a probe text is split: tokenizers of one hash give equal ids."""
    what = [sorted(tokenizer.get_vocab().items()), tokenizer.encode(_PROBE, add_special_tokens=False)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _without_weights(config: Any, dtype: torch.dtype, name: str) -> Any:
    """Build a model whose parameters have shapes but no values."""
    try:
        with shapes_alone():
            return AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ArtifactError(
            f"the config.json of target {name} describes no model that transformers can build "
            f"({type(error).__name__}: {reason}); get the folder again"
        ) from error


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ArtifactError(
            f"{folder} has no tokenizer (tokenizer.json); copy the model's tokenizer files there"
        )
    try:
        return keep_spaces(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    except BaseException as error:
        if not is_failure(error):
            raise
        hint = legacy_hint(error)
        raise ArtifactError(
            f"the tokenizer of {folder} cannot be read ({first_line(error)})" + (f"; {hint}" if hint else "")
        ) from error


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    value = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if value is None or value not in DTYPES.values():
        raise refusal(ConfigError, f"target.dtype={dtype}", f"auto, {', '.join(DTYPES)}")
    return value


def _device(device: str | torch.device) -> torch.device:
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise refusal(
            ConfigError, f"target.device={device} is not a device", "cpu, cuda, cuda:0, ..."
        ) from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"target.device={device}, but torch sees no CUDA device here; pass target.device=cpu"
        )
    return wanted
