"""Measures how other ways of running the target agree with sequences that the full cache generated.

Every system reads the same sequence token by token (teacher forcing) with its own cache, so that positions
can be compared: its most likely token, and the token's negative log-likelihood. As long as its own next token
equals that of the sequence, it would have generated the same sequence by itself; so its first differing token
is the position at which its own output diverges from the full cache's.

Shapes: B sequences, N tokens of the longest, T tokens of a step, E hidden dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.decoding.engine import Engine
from longtrain.decoding.prefill import pad
from longtrain.decoding.roles import Parts
from longtrain.decoding.sampling import HashRng, Sampling, probs
from longtrain.decoding.stats import repeated
from longtrain.errors import DataError
from longtrain.evaluation.harness.protocol import json_hash
from longtrain.evaluation.perplexity import ROWS, hidden_states, read_contexts
from longtrain.evaluation.records import ids_sha256
from longtrain.files import as_json, read_json, write_files

if TYPE_CHECKING:
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class Rollout:
    """A prompt and the sequence that the full cache generated after it.

    Args:
        prompt: token ids.
        text: the new tokens.
        rng: key of its random numbers.
        states_NE: the full cache's final hidden states that predict each new token but the first, on the CPU.
    """

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    rng: int
    states_NE: Tensor


@dataclass(frozen=True)
class RolloutWriter:
    """Generates sequences with the full cache, once for all runs: they are cached in files.

    Args:
        folder: the folder of the files.
        max_new_tokens: the maximum number of tokens of a sequence.
        sampling: the sampling settings.
        ignore_eos: continue past the end-of-text token.
    """

    folder: Path
    max_new_tokens: int
    sampling: Sampling
    ignore_eos: bool = False

    def settings(self) -> dict[str, Any]:
        """JSON values that determine a sequence, besides its prompt and the target."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            "sampling": asdict(self.sampling),
        }

    def write(self, target: Target, prompts: Mapping[int, Sequence[int]]) -> list[Rollout]:
        """Generate (or read) the sequences after some prompts, with the full cache's hidden states.

        Args:
            target: the frozen model.
            prompts: random-number key of a prompt -> token ids; decoded together.

        Raises:
            DataError: a cached file is damaged.
        """
        files = {rng: self._file(target, rng, prompt) for rng, prompt in prompts.items()}
        missing = {rng: list(prompt) for rng, prompt in prompts.items() if not files[rng].is_file()}
        if missing:
            made = Engine(target).generate(
                list(missing.values()),
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                ignore_eos=self.ignore_eos,
                sequence_ids=list(missing),
            )
            for rng, tokens in zip(missing, made.tokens, strict=True):
                write_files(self.folder, {files[rng].name: as_json({"tokens": tokens})})
        texts = [_tokens_of(file) for file in files.values()]
        states = full_states(target, list(prompts.values()), texts)
        return [
            Rollout(tuple(prompt), tuple(text), rng, states_NE.cpu())
            for (rng, prompt), text, states_NE in zip(prompts.items(), texts, states, strict=True)
        ]

    def _file(self, target: Target, rng: int, prompt: Sequence[int]) -> Path:
        """The cache file of a sequence; its name depends on target, prompt and sampling."""
        identity = {
            **self.settings(),
            "weights": target.info.weights_hash,
            "dtype": str(target.dtype),
            "device": target.device.type,
            "coins": rng,
            "prompt": ids_sha256(prompt),
        }
        return self.folder / f"{json_hash(identity)}.json"


@dataclass(frozen=True)
class Steps:
    """A system's predictions at each token of a sequence; the first token is predicted by the prompt.

    Args:
        nats: negative log-likelihood of the sequence's token.
        agreed: True if its most likely token is the full cache's.
        divergence: KL divergence of the full cache's distribution from its own, in nats.
        own: True if the token it would have sampled is the sequence's.
        kept_entries: the prompt's KV entries in its cache, mean over layers and KV heads.
        repeated: number of the sequence's tokens in text that it held before (`stats.repeated`).
    """

    nats: Sequence[float]
    agreed: Sequence[bool]
    divergence: Sequence[float]
    own: Sequence[bool]
    kept_entries: float = 0.0
    repeated: int = 0

    def metrics(self, stretches: Sequence[tuple[int, int]]) -> dict[str, float]:
        """Sums over the sequence, and over stretches of it as `NAME@END`.

        `nats`, `agreed` and `divergence` over `tokens`; of the whole sequence also `repeated_tokens`, and
        `own_tokens`: the tokens before its own output diverges from the full cache's.
        """
        count = len(self.nats)
        found = self._sums(0, count)
        left = next((place for place, same in enumerate(self.own) if not same), count)
        found |= {"own_tokens": float(left), "repeated_tokens": float(self.repeated)}
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
    """Divide a sequence of `count` tokens into stretches: the first ends at `first`, each next end is twice
    as far.
    """
    found, begin, end = [], 0, first
    while begin < count:
        found.append((begin, min(end, count)))
        begin, end = end, 2 * end
    return found


@torch.no_grad()
def full_states(
    target: Target, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The full cache's final hidden states that predict each token of a sequence but the first, [N-1, E].

    The sequences are read in the steps of `follow`, so that a system that reads the same entries in the same
    steps has the same bits: its divergence is exactly 0.
    """
    read = read_contexts(target, Parts(), prompts, scored=texts)
    found: list[list[Tensor]] = [[] for _ in texts]
    for _, m_B, hidden_BTE in hidden_states(target, read, texts, rows=_rows(len(texts))):
        for row, count in enumerate(m_B.tolist()):
            found[row].append(hidden_BTE[row, :count].clone())
    none_NE = target.head_weight.new_zeros(0, target.head_weight.shape[1])
    return [torch.cat([none_NE, *some]) for some in found]


@torch.no_grad()
def follow(target: Target, parts: Parts, rollouts: Sequence[Rollout], sampling: Sampling) -> list[Steps]:
    """Run a system over sequences of the full cache, and compare its predictions with theirs.

    Args:
        target: the frozen model.
        parts: evictor, cache and selector; a draft is ignored.
        rollouts: the sequences, processed as one batch.
        sampling: how the sequences were sampled; a system's own tokens are sampled with the same random
            numbers.
    """
    prompts, texts = [list(one.prompt) for one in rollouts], [list(one.text) for one in rollouts]
    keys = [one.rng for one in rollouts]
    read = read_contexts(target, parts, prompts, scored=texts, sequence_ids=keys)
    ids_BN, n_B = pad(texts, target.device)
    states = [one.states_NE.to(target.device) for one in rollouts]
    states_BNE = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    rng_B = torch.tensor(keys, device=target.device)
    wide = torch.promote_types(target.dtype, torch.float32)
    book = _StepTable(ids_BN, rng_B, read.n_B, sampling)
    assert read.step.logits_BTV is not None
    first_B1V = read.step.logits_BTV[:, -1:].to(wide)
    book.add(torch.zeros_like(n_B)[:, None], n_B[:, None] > 0, first_B1V, first_B1V)
    steps = hidden_states(target, read, texts, rows=_rows(len(texts)), selector=parts.selector)
    for at_B, m_B, hidden_BTE in steps:
        step_T = torch.arange(hidden_BTE.shape[1], device=target.device)
        place_BT, there_BT = at_B[:, None] + step_T, step_T < m_B[:, None]
        from_BT = (place_BT - 1).clamp(max=states_BNE.shape[1] - 1)
        full_BTE = states_BNE.gather(1, from_BT[..., None].expand(-1, -1, states_BNE.shape[2]))
        book.add(place_BT, there_BT, target.head(hidden_BTE).to(wide), target.head(full_BTE).to(wide))
    found = book.steps(n_B.tolist())
    return [
        replace(one, kept_entries=kept, repeated=repeated(text))
        for one, kept, text in zip(found, read.kept_entries, texts, strict=True)
    ]


def _rows(sequences: int) -> int:
    """Tokens of a step; logits of all sequences exist at once."""
    return max(1, ROWS // sequences)


class _StepTable:
    """Metrics of each position, filled step by step on the device; the last column collects invalid
    positions.
    """

    def __init__(self, ids_BN: Tensor, rng_B: Tensor, prompt_B: Tensor, sampling: Sampling) -> None:
        self.ids_BN, self.rng_B, self.prompt_B, self.sampling = ids_BN, rng_B, prompt_B, sampling
        B, N = ids_BN.shape
        self.found_4BN = torch.zeros(4, B, N + 1, dtype=torch.float64, device=ids_BN.device)

    def add(self, place_BT: Tensor, there_BT: Tensor, own_BTV: Tensor, full_BTV: Tensor) -> None:
        """Add the logits of a system and of the full cache for the tokens at `place_BT`, where `there_BT` is
        True.
        """
        N = self.ids_BN.shape[1]
        wanted_BT = self.ids_BN.gather(1, place_BT.clamp(max=N - 1))
        own_probs_BTV, probs_BTV = own_BTV.log_softmax(-1), full_BTV.log_softmax(-1)
        rows = (
            -own_probs_BTV.gather(-1, wanted_BT[..., None])[..., 0],
            own_BTV.argmax(-1) == full_BTV.argmax(-1),
            (probs_BTV.exp() * (probs_BTV - own_probs_BTV)).sum(-1).clamp(min=0),
            self._drawn(own_BTV, place_BT) == wanted_BT,
        )
        column_BT = place_BT.where(there_BT, N)
        for found_BN, row_BT in zip(self.found_4BN, rows, strict=True):
            found_BN.scatter_(1, column_BT, row_BT.double())

    def steps(self, counts: Sequence[int]) -> Iterator[Steps]:
        """Yield the metrics of each sequence's positions, given the sequences' lengths."""
        for row, count in enumerate(counts):
            nats, agreed, divergence, own = self.found_4BN[:, row, :count].tolist()
            yield Steps(nats, list(map(bool, agreed)), divergence, list(map(bool, own)))

    def _drawn(self, logits_BTV: Tensor, place_BT: Tensor) -> Tensor:
        """The token that decoding would sample at each place."""
        if self.sampling.greedy:
            return logits_BTV.argmax(-1)
        rng_BT = self.rng_B[:, None].expand_as(place_BT)
        rng = HashRng(self.sampling.seed, rng_BT.flatten())
        pos_BT = self.prompt_B[:, None] + place_BT
        probs_BTV = probs(logits_BTV, self.sampling)
        return rng.draw(probs_BTV.flatten(0, 1), pos_BT.flatten(), "target").view_as(place_BT)


def _tokens_of(file: Path) -> list[int]:
    """Read the token ids of a cached sequence."""
    try:
        tokens = read_json(file)["tokens"]
        if tokens and all(type(one) is int for one in tokens):
            return list(tokens)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{file} holds no text that the full cache wrote; remove it, and it is written anew")
