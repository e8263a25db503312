"""Eviction policies over the same prompts, length by length; a run that was cut off goes on where it was.

The figures made of what comes out are in `eviction_scores`, tables and pictures in `eviction_report`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longtrain.errors import ConfigError
from longtrain.evaluation.eviction_protocol import FULL, ORACLE, Advance, Contender, Json, Protocol
from longtrain.evaluation.eviction_ranks import Ranks
from longtrain.evaluation.eviction_runs import measure
from longtrain.evaluation.eviction_tasks import Prompt
from longtrain.evaluation.pieces import Pieces

if TYPE_CHECKING:
    from longtrain.targets.model import Target


def run(
    target: Target,
    contenders: Sequence[Contender],
    prompts: dict[int, list[Prompt]],
    *,
    protocol: Protocol,
    pieces: Pieces,
    advance: Advance = lambda what, done: None,
) -> dict[tuple[str, int], Json]:
    """Let every contender answer every prompt.

    Args:
        target: the frozen model.
        contenders: the full cache first; names must differ. One of kind `oracle` has the true scores.
        prompts: by length (`make_prompts`).
        protocol: what to do.
        pieces: what an earlier run left; filled as pieces come.
        advance: told of progress.

    Returns: a piece for every contender's name and length.

    Raises:
        ConfigError: two contenders of one name, a length that the target's context does not hold, a budget
            below what a policy keeps in any case, or kept pieces of other settings.
    """
    names = [one.name for one in contenders]
    if contenders[0].kind != FULL or len(set(names)) < len(names):
        raise ConfigError(f"policies {names} do not differ in name; give each once, or set a label")
    most = target.info.max_positions - protocol.max_new_tokens
    if max(protocol.lengths) > most:
        raise ConfigError(
            f"length {max(protocol.lengths)} with {protocol.max_new_tokens} new tokens exceeds the target's "
            f"context of {target.info.max_positions}; pass lengths of at most {most}"
        )
    settings = {
        (one.name, length): {**protocol.settings(target, one), "text_sha256": _mark(prompts[length])}
        for length in protocol.lengths
        for one in contenders
    }
    known = {key: pieces.get("{}@{}".format(*key), values) for key, values in settings.items()}
    oracle = next((one.make for one in contenders if one.kind == ORACLE), None)
    found: dict[tuple[str, int], Json] = {}
    for length in protocol.lengths:
        ranks = (
            Ranks(target, oracle(protocol.budgets[0]), protocol) if oracle and protocol.rank_prompts else None
        )
        gold: list[list[list[int] | None]] = []
        for one in contenders:
            piece = known[one.name, length]
            if piece is None:
                made = measure(
                    target, one, prompts[length], protocol=protocol, ranks=ranks, gold=gold, advance=advance
                )
                piece = pieces.put(f"{one.name}@{length}", settings[one.name, length], made)
            else:
                advance(f"{one.name} @ {length}", answers(one, protocol))
            if one.kind == FULL:
                gold = piece["continued"]
            found[one.name, length] = piece
    return found


def _mark(prompts: Sequence[Prompt]) -> str:
    """What tells prompts of one text from those of another."""
    tokens = json.dumps([prompt.whole for prompt in prompts])
    return hashlib.sha256(tokens.encode()).hexdigest()


def answers(contender: Contender, protocol: Protocol) -> int:
    """Answers that a contender gives at one length: what its share of a progress bar is."""
    return protocol.prompts * (len(protocol.budgets) if contender.make else 1)
