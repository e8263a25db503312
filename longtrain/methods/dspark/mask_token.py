"""Chooses the token whose embedding fills the unknown places of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from longtrain.errors import ConfigError
from longtrain.methods.dspark.modules import UNCHOSEN

if TYPE_CHECKING:
    from longtrain.methods.dspark.config import Config
    from longtrain.methods.dspark.modules import DSparkDraft
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target

RESERVED = ("reserved", "unused")
"""Parts of the names of special tokens that published models leave unused."""


def choose_mask_token(draft: DSparkDraft, target: Target, config: Config) -> None:
    """Set a draft's `mask_id`, unless it was chosen before.

    The first of these whose embedding is not zero: the tokenizer's mask token; the first row of the
    embeddings beyond the tokenizer's tokens; a special token with a name of `RESERVED`; the padding token;
    the token that ends a text. The last two never begin a block that anything is drafted in.

    Raises:
        ConfigError: `mask_token` is no token of the target, its embedding is zero, none was found, or the
            draft was trained with another one.
    """
    size, given, before = target.info.vocab_size, config.mask_token, int(draft.mask_id)
    if before != UNCHOSEN:
        if given is not None and given != before:
            raise ConfigError(
                f"method.mask_token={given}, and the draft was trained with {before}; pass that, or leave it "
                "out"
            )
        return
    check_mask_token(config, target.info)
    for token in (given,) if given is not None else _candidates(target):
        if 0 <= token < size and bool(target.embed_weight[token].any()):
            draft.mask_id.fill_(token)
            return
    if given is not None:
        raise ConfigError(
            f"method.mask_token={given}: its embedding in {target.info.name} is zero, so that masks would "
            "carry nothing; pass a token with an embedding, or leave it out"
        )
    raise ConfigError(
        f"target {target.info.name} has no mask, unused, padding or end token; pass method.mask_token=ID"
    )


def check_mask_token(config: Config, info: TargetInfo) -> None:
    """Refuse a mask token that is no token of the target; raises ConfigError."""
    given, size = config.mask_token, info.vocab_size
    if given is not None and not 0 <= given < size:
        raise ConfigError(f"method.mask_token={given}; target {info.name} has tokens 0..{size - 1}")


def _candidates(target: Target) -> Iterator[int]:
    """Return ids in the order of preference; some may be outside of the vocabulary."""
    tokenizer = target.tokenizer
    if tokenizer is not None:
        if tokenizer.mask_token_id is not None:
            yield int(tokenizer.mask_token_id)
        yield from range(len(tokenizer), target.info.vocab_size)
        special = sorted((i, str(t)) for i, t in tokenizer.added_tokens_decoder.items() if t.special)
        yield from (i for i, name in special if any(word in name for word in RESERVED))
        if tokenizer.pad_token_id is not None:
            yield int(tokenizer.pad_token_id)
    yield from target.info.eos_ids
