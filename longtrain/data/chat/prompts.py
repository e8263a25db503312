"""Documents as a prompt and its response, and running text cut into them.

Shapes: T tokens of one prompt or document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from longtrain.data.read.adapters import Document
from longtrain.data.config import DataConfig
from longtrain.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the response that the corpus has for it.

    Args:
        document: where it is from, for names and kinds.
        ids_T: what the target is given, int64.
        begin: first token of the labels: `len(ids_T)`, or where the question begins if it is to be out of an
            evictor's view.
        answer_T: the recorded response with its end mark, int64; None: the target is to write it.
    """

    document: Document
    ids_T: np.ndarray
    begin: int
    answer_T: np.ndarray | None = None

    def answered(self, answer_T: np.ndarray) -> tuple[Document, np.ndarray, np.ndarray]:
        """Document, ids and label mask with that response."""
        ids_T = np.concatenate([self.ids_T, answer_T]).astype(np.int64)
        mask_T = np.zeros(len(ids_T), bool)
        mask_T[self.begin :] = True
        return self.document, ids_T, mask_T


def cut_text(
    document: Document,
    ids_T: np.ndarray,
    config: DataConfig,
    *,
    count: int = 1,
    limit: int | None = None,
    bos: int | None = None,
) -> Iterator[Prompt]:
    """Running text cut at random points: a prompt, and the text that follows as its response.

    A document that fits whole is cut at a uniform point. From a longer one, or where several prompts are
    wanted, a stretch of log-uniform length is taken anywhere. All is a function of seed and document name,
    and the same whoever writes the responses.

    Args:
        document: its name draws the points.
        ids_T: all its tokens.
        config: `prompt_tokens` bounds the prompts, `answer_tokens` the responses.
        count: prompts of a document, less where it is too short for as many.
        limit: most tokens of a prompt and its response; None: no limit.
        bos: a token that texts begin with; kept at every prompt's beginning.
    """
    if config.prompt_tokens is None:
        return
    head_T = ids_T[: int(len(ids_T) > 0 and ids_T[0] == bos)]
    body_T = ids_T[len(head_T) :]
    low, high = (tokens - len(head_T) for tokens in config.prompt_tokens)
    if limit is not None:
        high = min(high, limit - config.answer_tokens - len(head_T))
    rest = max(1, min(config.answer_tokens, len(body_T) // 4))
    high = min(high, len(body_T) - rest)
    if high < max(low, 1):
        return
    whole = count == 1 and len(body_T) <= config.prompt_tokens[1] + config.answer_tokens
    for number in range(min(count, max(1, len(body_T) // (low + rest)))):
        name = f"{document.name}@{number}" if count > 1 else document.name
        digest = hashlib.sha256(f"{config.seed}:{document.name}:{number}".encode()).digest()
        rng = np.random.default_rng(list(digest[:8]))
        if whole:
            n, start = int(rng.integers(low, high + 1)), 0
        else:
            n = min(high, int(np.exp(rng.uniform(np.log(max(low, 1)), np.log(high + 1)))))
            start = int(rng.integers(len(body_T) - rest - n + 1))
        end = start + n
        yield Prompt(
            replace(document, name=name, group=document.group or document.name),
            np.concatenate([head_T, body_T[start:end]]),
            n + len(head_T),
            body_T[end : end + config.answer_tokens],
        )


def check_room(config: DataConfig, limit: int | None) -> None:
    """Refuse prompts that leave no room for themselves beside their answers.

    Raises:
        ConfigError: the limit is below `answer_tokens` and the shortest prompt.
    """
    shortest = config.prompt_tokens[0] if config.prompt_tokens else 1
    if limit is not None and limit < config.answer_tokens + shortest:
        raise ConfigError(
            f"{limit} tokens a document (data.max_doc_tokens, or the target's context) have no room for "
            f"data.answer_tokens={config.answer_tokens} behind a prompt of {shortest}; raise the first or "
            f"lower the second"
        )
