"""A small target, folders with block drafts of it, and what longtrain computes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtrain.files import write_files
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.formats import FORMATS
from longtrain.methods.dspark.formats.blocks import block_states
from longtrain.methods.dspark.mask_token import choose_mask_token
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.targets.model import Target
from tests.helpers import target_from_model

SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 512}
TOKENS, ANCHORS = 72, (5, 17, 40, 41, 58)
SMALL = {"layers": [1, 2, 4], "n_layers": 2, "block_size": 5, "markov_rank": 6, "intermediate_size": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, dict[str, Any]] = {
    "dspark": {},
    "without confidence": {"heads": "markov"},
    "fill in": {"sample_from_anchor": False},
    "dflash": {"heads": "none", "sample_from_anchor": False},
    "own shape and rope": {"head_dim": 24, "n_heads": 2, "n_kv_heads": 1, "rope": LLAMA3},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "one window": {"windows": [12, None]},
    "windows alone": {"windows": [9, 9]},
    "dflash, windows": {"heads": "none", "sample_from_anchor": False, "windows": [9, 9]},
}


PART = {"draft_vocab_size": 40, "objective": "lk_hybrid"}
PARTS: dict[str, dict[str, Any]] = {
    "part of the vocabulary": PART,
    "dflash, part of the vocabulary": {**PART, "heads": "none", "sample_from_anchor": False},
}
"""Drafts with an LM head of their own, which folders of speculators have."""


def small_target(folder: Path) -> Target:
    """A random target, saved in a folder."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SHAPE, eos_token_id=0, initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return target_from_model(model, name=str(folder))


def block_draft(config: Config, target: Target) -> DSparkDraft:
    """A draft whose every tensor matters."""
    gen = torch.Generator().manual_seed(3)
    module = DSparkDraft(config, target.info)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            fresh = torch.randn(tensor.shape, generator=gen)
            tensor.copy_(fresh * (0.12 if tensor.ndim == 2 else 0.2) + ("norm" in name))
        if module.draft_ids_K is not None:
            # with token 0, which ends texts
            others = torch.randperm(96, generator=gen)[: len(module.draft_ids_K) - 1] + 1
            module.draft_ids_K.copy_(torch.cat((torch.tensor([0]), others)).sort().values)
    choose_mask_token(module, target, config)
    return module.eval()


def exported(folder: Path, form: str, fields: dict[str, Any], target: Target) -> tuple[DSparkDraft, Config]:
    """Write a draft as a folder of a format."""
    config = Config(**{**SMALL, **fields})
    module = block_draft(config, target)
    write_files(folder, FORMATS.write(form, module.state_dict(), config, target, {"step": 1}, folder.name))
    return module, config


def inputs_of(config: Config, seed: int) -> dict[str, Tensor]:
    """States of the target's layers, tokens, and anchors."""
    gen = torch.Generator().manual_seed(seed)
    assert config.layers is not None
    return {
        "states": torch.randn(TOKENS, 48 * len(config.layers), generator=gen),
        "ids": torch.randint(97, (TOKENS,), generator=gen),
        "anchors": torch.tensor(ANCHORS),
    }


@torch.no_grad()
def our_blocks(
    module: DSparkDraft, config: Config, target: Target, inputs: dict[str, Tensor], less: int | None = None
) -> dict[str, Tensor]:
    """States, logits and confidence of all slots, after the text's own tokens."""
    ids, place = inputs["ids"], inputs["anchors"]
    rows = module.mask_id.expand(len(place), config.rows).clone()
    rows[:, 0] = ids[place]
    hidden = block_states(
        module,
        config,
        target.info,
        inputs["states"],
        torch.arange(TOKENS),
        place,
        target.embed(rows),
        less=less,
    )
    before = ids[place[:, None] + torch.arange(config.block_size)]
    logits = target.head(hidden) if module.lm_head is None else module.lm_head(hidden)
    found = {"hidden": hidden, "logits": logits}
    if module.markov_head is not None:
        found["logits"] = module.markov_head(logits, hidden, before)
        if module.confidence_head is not None:
            found["confidence"] = module.confidence_head(hidden, module.markov_head.markov_w1(before))
    return found


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any output."""
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)
