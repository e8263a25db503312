"""Texts that the full cache wrote, and how other ways of running the target follow them.

Every system is told the same text token by token and reads it in its own way, so that positions can be
compared: which token it finds likeliest, and what the text costs it. As long as its own next token is that of
the text, the text is also what it would have written alone; so the first token of its own that differs says
where its own text leaves the full cache's.

Shapes: B texts, N tokens of the longest, T rows of a step, E hidden dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.decoding.engine import Engine
from longtrain.decoding.prefill import pad
from longtrain.decoding.roles import Parts
from longtrain.decoding.sampling import HashCoins, Sampling, probs
from longtrain.errors import DataError
from longtrain.evaluation.harness.protocol import json_hash
from longtrain.evaluation.perplexity import ROWS, read_contexts, told
from longtrain.evaluation.records import ids_sha256
from longtrain.files import as_json, read_json, write_files

if TYPE_CHECKING:
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class Rollout:
    """A prompt and what the full cache wrote after it.

    Args:
        prompt: token ids.
        text: the new tokens.
        coins: what random coins know it by.
        states_NE: the full cache's final hidden states that foretell each new token but the first.
    """

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    coins: int
    states_NE: Tensor


@dataclass(frozen=True)
class RolloutWriter:
    """Lets the full cache write, once for all runs: texts are kept in files.

    Args:
        folder: of the files.
        max_new_tokens: most tokens of a text.
        sampling: how they are drawn.
        ignore_eos: go on past the end of text.
    """

    folder: Path
    max_new_tokens: int
    sampling: Sampling
    ignore_eos: bool = True

    def settings(self) -> dict[str, Any]:
        """JSON values that a text follows from, beside its prompt and the target."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            "sampling": asdict(self.sampling),
        }

    def write(self, target: Target, prompts: Mapping[int, Sequence[int]]) -> list[Rollout]:
        """The texts after some prompts, with the full cache's states.

        Args:
            target: the frozen model.
            prompts: what coins know a prompt by -> token ids; run together.

        Raises:
            DataError: a file that holds no text.
        """
        files = {coins: self._file(target, coins, prompt) for coins, prompt in prompts.items()}
        missing = {coins: list(prompt) for coins, prompt in prompts.items() if not files[coins].is_file()}
        if missing:
            made = Engine(target).generate(
                list(missing.values()),
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                ignore_eos=self.ignore_eos,
                sequence_ids=list(missing),
            )
            for coins, tokens in zip(missing, made.tokens, strict=True):
                write_files(self.folder, {files[coins].name: as_json({"tokens": tokens})})
        texts = [_tokens_of(file) for file in files.values()]
        states = full_states(target, list(prompts.values()), texts)
        return [
            Rollout(tuple(prompt), tuple(text), coins, states_NE)
            for (coins, prompt), text, states_NE in zip(prompts.items(), texts, states, strict=True)
        ]

    def _file(self, target: Target, coins: int, prompt: Sequence[int]) -> Path:
        """Where a text is kept: another target, prompt or way of writing has another file."""
        said = {
            **self.settings(),
            "weights": target.info.weights_hash,
            "dtype": str(target.dtype),
            "device": target.device.type,
            "coins": coins,
            "prompt": ids_sha256(prompt),
        }
        return self.folder / f"{json_hash(said)}.json"


@dataclass(frozen=True)
class Steps:
    """What a system does at each token of a text; the first token follows from the prompt, read whole.

    Args:
        nats: cost of the text's token.
        agreed: whether its likeliest token is the full cache's.
        divergence: Kullback-Leibler divergence of the full cache's law from its own, in nats.
        own: whether the token it would have drawn is the text's.
    """

    nats: Sequence[float]
    agreed: Sequence[bool]
    divergence: Sequence[float]
    own: Sequence[bool]

    def figures(self, stretches: Sequence[tuple[int, int]]) -> dict[str, float]:
        """Sums over the text, and over stretches of it as `NAME@END`.

        `nats`, `agreed` and `divergence` of `tokens`, and `own_tokens`: those before its own text leaves the
        full cache's.
        """
        count = len(self.nats)
        found = self._sums(0, count)
        left = next((place for place, same in enumerate(self.own) if not same), count)
        found["own_tokens"] = float(left)
        for first, end in stretches:
            if first < count:
                sums = self._sums(first, min(end, count))
                found |= {f"{key}@{end}": value for key, value in sums.items()}
                found[f"score@{end}"] = sums["agreed"] / sums["tokens"]
        return found

    def _sums(self, first: int, end: int) -> dict[str, float]:
        here = slice(first, end)
        return {
            "nats": float(sum(self.nats[here])),
            "tokens": float(end - first),
            "agreed": float(sum(self.agreed[here])),
            "divergence": float(sum(self.divergence[here])),
        }


def stretches(count: int, first: int) -> list[tuple[int, int]]:
    """Stretches of a text of `count` tokens: the first ends at `first`, each further one doubles the end."""
    found, begin, end = [], 0, first
    while begin < count:
        found.append((begin, min(end, count)))
        begin, end = end, 2 * end
    return found


@torch.no_grad()
def full_states(
    target: Target, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The full cache's final hidden states that foretell each token of a text but the first, [N-1, E]."""
    read = read_contexts(target, Parts(), prompts, scored=texts)
    found: list[list[Tensor]] = [[] for _ in texts]
    for _, m_B, hidden_BTE in told(target, read, texts):
        for row, count in enumerate(m_B.tolist()):
            found[row].append(hidden_BTE[row, :count].clone())
    none_NE = target.head_weight.new_zeros(0, target.head_weight.shape[1])
    return [torch.cat([none_NE, *some]) for some in found]


@torch.no_grad()
def follow(target: Target, parts: Parts, rollouts: Sequence[Rollout], sampling: Sampling) -> list[Steps]:
    """How a system follows texts of the full cache.

    Args:
        target: the frozen model.
        parts: evictor, cache and selector; a draft has no part in this.
        rollouts: read together.
        sampling: how the texts were drawn; a system's own tokens are drawn with the same coins.
    """
    prompts, texts = [list(one.prompt) for one in rollouts], [list(one.text) for one in rollouts]
    read = read_contexts(target, parts, prompts, scored=texts)
    ids_BN, n_B = pad(texts, target.device)
    states_BNE = torch.nn.utils.rnn.pad_sequence([one.states_NE for one in rollouts], batch_first=True)
    coins_B = torch.tensor([one.coins for one in rollouts], device=target.device)
    wide = torch.promote_types(target.dtype, torch.float32)
    book = _StepTable(ids_BN, coins_B, read.n_B, sampling)
    assert read.step.logits_BTV is not None
    first_B1V = read.step.logits_BTV[:, -1:].to(wide)
    book.add(torch.zeros_like(n_B)[:, None], n_B[:, None] > 0, first_B1V, first_B1V)
    rows = max(1, ROWS // len(rollouts))  # logits of all texts at once
    for at_B, m_B, hidden_BTE in told(target, read, texts, rows=rows, selector=parts.selector):
        step_T = torch.arange(hidden_BTE.shape[1], device=target.device)
        place_BT, there_BT = at_B[:, None] + step_T, step_T < m_B[:, None]
        from_BT = (place_BT - 1).clamp(max=states_BNE.shape[1] - 1)
        full_BTE = states_BNE.gather(1, from_BT[..., None].expand(-1, -1, states_BNE.shape[2]))
        book.add(place_BT, there_BT, target.head(hidden_BTE).to(wide), target.head(full_BTE).to(wide))
    return list(book.steps(n_B.tolist()))


class _StepTable:
    """Figures of each position, filled step by step on the device; the last column takes what does not count.

    Args:
        ids_BN: the texts.
        coins_B: what random coins know them by.
        prompt_B: tokens of their prompts.
        sampling: how they were drawn.
    """

    def __init__(self, ids_BN: Tensor, coins_B: Tensor, prompt_B: Tensor, sampling: Sampling) -> None:
        self.ids_BN, self.coins_B, self.prompt_B, self.sampling = ids_BN, coins_B, prompt_B, sampling
        B, N = ids_BN.shape
        self.found_4BN = torch.zeros(4, B, N + 1, dtype=torch.float64, device=ids_BN.device)

    def add(self, place_BT: Tensor, there_BT: Tensor, own_BTV: Tensor, full_BTV: Tensor) -> None:
        """Logits of a system and of the full cache for the tokens at some places, where they are there."""
        N = self.ids_BN.shape[1]
        wanted_BT = self.ids_BN.gather(1, place_BT.clamp(max=N - 1))
        own_law_BTV, law_BTV = own_BTV.log_softmax(-1), full_BTV.log_softmax(-1)
        rows = (
            -own_law_BTV.gather(-1, wanted_BT[..., None])[..., 0],
            own_BTV.argmax(-1) == full_BTV.argmax(-1),
            (law_BTV.exp() * (law_BTV - own_law_BTV)).sum(-1).clamp(min=0),
            self._drawn(own_BTV, place_BT) == wanted_BT,
        )
        column_BT = place_BT.where(there_BT, N)
        for found_BN, row_BT in zip(self.found_4BN, rows, strict=True):
            found_BN.scatter_(1, column_BT, row_BT.double())

    def steps(self, counts: Sequence[int]) -> Iterator[Steps]:
        """What each text's positions show, given how many it has."""
        for row, count in enumerate(counts):
            nats, agreed, divergence, own = self.found_4BN[:, row, :count].tolist()
            yield Steps(nats, list(map(bool, agreed)), divergence, list(map(bool, own)))

    def _drawn(self, logits_BTV: Tensor, place_BT: Tensor) -> Tensor:
        """The token that decoding would draw there."""
        if self.sampling.greedy:
            return logits_BTV.argmax(-1)
        coins_BT = self.coins_B[:, None].expand_as(place_BT)
        coins = HashCoins(self.sampling.seed, coins_BT.flatten())
        pos_BT = self.prompt_B[:, None] + place_BT
        law_BTV = probs(logits_BTV, self.sampling)
        return coins.draw(law_BTV.flatten(0, 1), pos_BT.flatten(), "target").view_as(place_BT)


def _tokens_of(file: Path) -> list[int]:
    """The text that a file holds.

    Raises:
        DataError: it holds none.
    """
    try:
        tokens = read_json(file)["tokens"]
        if tokens and all(type(one) is int for one in tokens):
            return list(tokens)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{file} holds no text that the full cache wrote; remove it, and it is written anew")
