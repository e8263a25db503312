"""Retrieval by free-running generation: seven-digit values hidden in held-out text, one of them asked for.

`run` measures what the cards of reference targets state: needles anywhere. The grid by depth is
`suites/needle.py`.

Shapes: T tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from longtrain.data.retrieval.material import ChatIds, TextStream
from longtrain.data.retrieval.synthetic import RetrievalWriter
from longtrain.decoding.engine import Engine
from longtrain.decoding.limits import Limits
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.figures.statistics import wilson
from longtrain.evaluation.framing import around_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.targets.model import Target

NUMBER = re.compile(r"\d+")
SUITE = "needle"


@dataclass(frozen=True)
class Protocol:
    """What is measured.

    Args:
        lengths: prompt lengths, tokens, chat marks included.
        needles: keys hidden in one prompt, each with one value; one is asked for.
        prompts: prompts of each cell (length x needles).
        max_new_tokens: most tokens of an answer.
        batch: prompts decoded together; they have one length, so nothing is padded.
        seed: of keys, values, places and text.
        single: ask for "the special magic number"; else for "all the special magic numbers".
    """

    lengths: tuple[int, ...] = (2048, 4096, 8192)
    needles: tuple[int, ...] = (1, 4, 8)
    prompts: int = 300
    max_new_tokens: int = 48
    batch: int = 25
    seed: int = 0
    single: bool = False

    def __post_init__(self) -> None:
        counts = [*self.lengths, *self.needles, self.prompts, self.max_new_tokens, self.batch]
        if not self.lengths or not self.needles or min(counts) < 1:
            raise ConfigError(
                f"needle suite {self} has an empty or non-positive setting; allowed: counts of 1 or more"
            )


@dataclass
class Cell:
    """One length and number of needles: prompts right, run and dropped (by reason), some wrong answers."""

    length: int
    needles: int
    right: int = 0
    ran: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    wrong: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `exact` holds the share and its Wilson interval."""
        exact = wilson(self.right, self.ran).to_json()
        return {**vars(self), "exact": exact}


def run(
    target: Target,
    texts: Mapping[str, str],
    protocol: Protocol = Protocol(),
    *,
    advance: Callable[[str, int], None] = lambda what, done: None,
) -> dict[str, Any]:
    """Measure a target.

    An answer is right if the numbers in it are exactly the value asked for.

    Args:
        target: with a tokenizer.
        texts: name -> held-out text to hide needles in; never seen in training.
        protocol: cells and counts.
        advance: told of progress: what, and prompts done.

    Returns: JSON values: `suite`, `target`, `protocol`, and a list of `cells`.

    Raises:
        ConfigError: the target has no tokenizer.
        DataError: no text.
    """
    writer = prompt_writer(target, texts)
    cells = [Cell(length, n) for length in protocol.lengths for n in protocol.needles]
    for cell in cells:
        _run_cell(target, writer, cell, protocol)
        advance(f"needle {cell.length}x{cell.needles}", cell.ran)
    return {
        "suite": SUITE,
        "target": {"name": target.info.name, "weights_hash": target.info.weights_hash},
        "protocol": vars(protocol),
        "texts": sorted(texts),
        "cells": [cell.to_json() for cell in cells],
    }


def prompt_writer(target: Target, texts: Mapping[str, str]) -> RetrievalWriter:
    """A writer of needle prompts into texts, in the target's own tokens and chat format."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ConfigError(f"target {target.info.name} has no tokenizer; the needle suite needs one")
    if not any(texts.values()):
        raise DataError(
            "the needle suite got no text to hide needles in; pass suite.texts=FOLDER or the bundled text"
        )

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    vocabulary = [str(tokenizer.decode([i])) for i in range(target.info.vocab_size)]
    ids_T = np.concatenate([np.array(encode(text), dtype=np.int64) for text in texts.values() if text])
    return RetrievalWriter(
        encode, chat_ids(tokenizer), [TextStream(ids_T, vocabulary, "held-out")], separator=-1
    )


def chat_ids(tokenizer: PreTrainedTokenizerBase) -> ChatIds:
    """The tokens around a user's turn, read off the chat template; plain text where there is none."""
    if not tokenizer.chat_template:
        before, after = tokenizer.bos_token or "", "\nAnswer:"
    else:
        before, after = around_message(tokenizer, enable_thinking=False)
    user, assistant = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after))
    return ChatIds(user, assistant, ())


def _run_cell(target: Target, writer: RetrievalWriter, cell: Cell, protocol: Protocol) -> None:
    tokenizer: Any = target.tokenizer
    if cell.length + protocol.max_new_tokens > target.info.max_positions:
        cell.dropped["longer than the target's context"] = protocol.prompts
        return
    rng = np.random.default_rng([protocol.seed, cell.length, cell.needles])
    try:
        pairs = [
            writer.needle_prompt(cell.length, cell.needles, rng, single=protocol.single)
            for _ in range(protocol.prompts)
        ]
    except ConfigError:
        cell.dropped["too short for its needles"] = protocol.prompts
        return
    limits = Limits(protocol.batch, cell.length + protocol.max_new_tokens, 1)
    engine = Engine(target, limits=limits)
    for first in range(0, len(pairs), protocol.batch):
        some = pairs[first : first + protocol.batch]
        made = engine.generate([prompt for prompt, _ in some], max_new_tokens=protocol.max_new_tokens)
        for tokens, (_, value) in zip(made.tokens, some, strict=True):
            answer = tokenizer.decode(tokens, skip_special_tokens=True)
            right = NUMBER.findall(answer) == [value]
            cell.ran += 1
            cell.right += right
            if not right and len(cell.wrong) < 3:
                cell.wrong.append({"expected": value, "answer": answer})


@torch.no_grad()
def bits_per_byte(
    target: Target,
    texts: Sequence[str],
    *,
    window: int = 4096,
    max_tokens: int = 200_000,
    row_tokens: int = 65536,
) -> dict[str, float | int]:
    """Bits a byte of text, each token predicted from at least half a window of its document before it.

    Args:
        target: with a tokenizer.
        texts: held-out documents.
        window: tokens of one forward's document piece; the first window of a document starts from nothing.
        max_tokens: most tokens of each text.
        row_tokens: tokens run at once.

    Returns: `bits_per_byte`, `bits_per_token`, `tokens`, `bytes`, `window`.
    """
    tokenizer: Any = target.tokenizer
    window = min(window, target.info.max_positions)
    stride = window // 2
    n_bytes = n_tokens = 0
    pieces: list[tuple[list[int], int]] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
        if len(ids) < 2:
            continue
        n_bytes += len(tokenizer.decode(ids).encode())
        n_tokens += len(ids) - 1
        pieces.append((ids[:window], 1))
        pieces += [(ids[at - stride : at + stride], stride) for at in range(window, len(ids), stride)]
    if not n_tokens:
        raise DataError("no text to measure bits per byte on")
    nats, row = 0.0, []
    for i, piece in enumerate(pieces):
        row.append(piece)
        if i + 1 == len(pieces) or sum(len(ids) for ids, _ in row) + window > row_tokens:
            nats += _nats(target, row)
            row = []
    return {
        "bits_per_byte": nats / math.log(2) / n_bytes,
        "bits_per_token": nats / math.log(2) / n_tokens,
        "tokens": n_tokens,
        "bytes": n_bytes,
        "window": window,
    }


def _nats(target: Target, row: list[tuple[list[int], int]]) -> float:
    """Nats of the tokens from each piece's second number on."""
    bounds = [0, *np.cumsum([len(ids) for ids, _ in row]).tolist()]
    ids_T = torch.tensor([i for ids, _ in row for i in ids], device=target.device)
    pos_T = torch.cat([torch.arange(len(ids)) for ids, _ in row]).to(target.device)
    hidden_TE = target.packed(ids_T, pos_T, tuple(bounds)).hidden[-1]
    total = 0.0
    for (ids, first), start in zip(row, bounds[:-1], strict=True):
        span = slice(start + first - 1, start + len(ids) - 1)
        logits = target.head(hidden_TE[span]).float()
        total += float(cross_entropy(logits, ids_T[start + first : start + len(ids)], reduction="sum"))
    return total
