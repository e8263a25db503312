"""A target small enough to know its law exactly, drafts of every law, and coins that enumerate.

Shapes: B batch, N tree nodes, S positions, E state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from longtrain.cache.base import KVCache, Mask, Tree
from longtrain.decoding.roles import ChildChoice, TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Rng, Sampling, probs
from longtrain.decoding.tree import depths, positions, visible
from longtrain.kernels.greedy import settle
from longtrain.targets.info import TargetInfo
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch


class ToyCache(KVCache):
    """Rows are vectors and attention is their plain sum, so every visible (token, position) pair matters."""

    def __init__(self, batch: int, max_tokens: int, max_nodes: int, size: int) -> None:
        self.len_B = torch.zeros(batch, dtype=torch.int64)
        self.prefix_BE = torch.zeros(batch, size, dtype=torch.float64)
        self.tail_BNE = self.prefix_BE[:, None]
        self.room = (max_tokens, max_nodes)

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        self.tail_BNE = k_BGTD[:, 0]

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, None]:
        n = self.tail_BNE.shape[1]
        seen = mask.visible_BNN if isinstance(mask, Tree) else torch.ones(n, n).tril().bool()
        out = self.prefix_BE[:, None] + seen.to(self.tail_BNE.dtype) @ self.tail_BNE
        return out[:, None], None

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        rows_BPE = self.tail_BNE
        if path_BP is not None:
            rows_BPE = rows_BPE.gather(1, path_BP[..., None].expand(-1, -1, rows_BPE.shape[-1]))
        taken = torch.arange(rows_BPE.shape[1]) < n_B[:, None]
        self.prefix_BE = self.prefix_BE + (rows_BPE * taken[..., None]).sum(1)
        self.len_B = self.len_B + n_B
        assert int(self.len_B.max()) <= self.room[0]

    def bytes(self) -> int:
        return self.prefix_BE.nbytes


class ToyTarget:
    """Logits are a fixed random function of the sum of everything visible; fp64."""

    def __init__(self, vocab: int, *, seed: int = 0, sharp: float = 1.5, eos: tuple[int, ...] = ()) -> None:
        gen = torch.Generator().manual_seed(seed)
        size = 16
        self.table_SVE = torch.randn(97, vocab, size, generator=gen, dtype=torch.float64)
        self.out_EV = sharp * torch.randn(size, vocab, generator=gen, dtype=torch.float64) / size**0.5
        self.device = torch.device("cpu")
        self.tokenizer: Letters | None = None
        self.info = TargetInfo(
            name="toy", family="toy", n_layers=1, n_heads=1, n_kv_heads=1, head_dim=size, hidden_size=size,
            intermediate_size=1, vocab_size=vocab, max_positions=4096, rms_norm_eps=1e-6, rope={},
            qk_norm=False, attention_bias=False, eos_ids=eos,
        )  # fmt: skip

    def new_cache(self, batch: int, max_tokens: int, max_nodes: int) -> ToyCache:
        return ToyCache(batch, max_tokens, max_nodes, self.table_SVE.shape[-1])

    def forward(
        self, rows: TokenBatch, cache: ToyCache, *, outputs: OutputRequest, hook: None = None
    ) -> TargetStep:
        tail = self.table_SVE[rows.pos_BT % 97, rows.ids_BT]
        cache.write(0, tail[:, None], tail[:, None])
        state, _ = cache.attend(0, tail[:, None], mask=rows.mask, scale=1.0)
        logits = torch.sin(state[:, 0]) @ self.out_EV
        if outputs.logits == "last" and rows.n_B is not None:
            logits = logits[torch.arange(len(rows.n_B)), rows.n_B - 1][:, None]
        return TargetStep(logits)

    def children(self, prompt: list[int], tokens: list[int], sampling: Sampling) -> float:
        """Exact probability that `tokens` follow `prompt`."""
        text = [*prompt, *tokens]
        state = torch.stack([self.table_SVE[i % 97, t] for i, t in enumerate(text)]).cumsum(0)
        p = probs(torch.sin(state) @ self.out_EV, sampling)
        first = len(prompt) - 1
        return float(torch.stack([p[first + i, t] for i, t in enumerate(tokens)]).prod())


class Letters:
    """A tokenizer: token i is the i-th letter, `z` and beyond are two letters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) if i < 25 else "z" + chr(97 + i - 25) for i in token_ids)


class OracleDraft:
    """Asks the target itself, level by level, and blurs what it says; draws its trees by any law.

    Deterministic trees are beams (ragged). Sampled trees give every parent its share of children, whatever is
    drawn.
    """

    def __init__(
        self, target: ToyTarget, *, noise: float = 1.0, children: ChildChoice | None = None, seed: int = 1
    ):
        self.outputs = OutputRequest()
        self.target, self.noise, self.children = target, noise, children
        gen = torch.Generator().manual_seed(seed)
        vocab = target.info.vocab_size
        self.blur_SV = torch.randn(89, vocab, generator=gen, dtype=torch.float64)

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        self.cache = cache

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        batch, children = len(root_B), shape.children
        tokens, parents = root_B[:, None], torch.full((batch, 1), -1)
        score = torch.zeros(batch, 1, dtype=torch.float64)
        q = torch.zeros(batch, shape.n_nodes, self.target.info.vocab_size, dtype=torch.float64)
        depth_N = depths(shape)
        first = 0
        for level, width in enumerate(shape.widths):
            q_level = self._law(tokens, parents, depth_N, sampling)[:, first:]
            q[:, first : first + q_level.shape[1]] = q_level
            if children is ChildChoice.POINT:
                joint = (score[..., None] + (q_level + 1e-9).log()).flatten(1)
                score, index = joint.topk(width)
                parent, token = index // q.shape[-1] + first, index % q.shape[-1]
            else:
                parent, token = self._sample(q_level, width, children, rng, level, first)
            first = tokens.shape[1]
            tokens, parents = torch.cat((tokens, token), 1), torch.cat((parents, parent), 1)
        return TokenTree(tokens, parents, depth_N, self.children or children, q)

    def _law(self, tokens: Tensor, parents: Tensor, depth_N: Tensor, sampling: Sampling) -> Tensor:
        tree = TokenTree(tokens, parents, depth_N[: tokens.shape[1]])
        pos = positions(tree, self.cache.len_B)
        rows = TokenBatch(pos, tokens, mask=Tree(visible(parents)))
        logits = self.target.forward(rows, self.cache, outputs=OutputRequest(logits="all")).logits_BTV
        blurred = logits + self.noise * self.blur_SV[(pos * 7 + tokens * 3) % 89]
        return probs(blurred, sampling if not sampling.greedy else Sampling(temperature=1.0))

    def _sample(
        self, q_BWV: Tensor, width: int, children: ChildChoice, rng: Rng, level: int, first: int
    ) -> tuple[Tensor, Tensor]:
        left = q_BWV.clone()
        parents, tokens = [], []
        for child in range(width):
            parent = child % q_BWV.shape[1]
            token = rng.draw(left[:, parent], self.cache.len_B + level + 1, f"draft{level}.{child}")
            if children is ChildChoice.NO_REPLACE:
                left[:, parent] = left[:, parent].scatter(1, token[:, None], 0.0)
            parents.append(torch.full_like(token, first + parent))
            tokens.append(token)
        return torch.stack(parents, 1), torch.stack(tokens, 1)

    def observe(self, tree: TokenTree, verdict: object, step: TargetStep) -> None:
        pass

    def bytes(self) -> int:
        return self.blur_SV.nbytes

    def tensors(self) -> None:
        return None


class EnumeratingRng:
    """Coins whose k-th answer is fixed, the same in every row; `weight_B` is how probable the answers are."""

    def __init__(self, answers: list[int], batch: int) -> None:
        self.answers, self.arity = answers, []
        self.weight_B = torch.ones(batch, dtype=torch.float64)

    def _answer(self, arity: int) -> int:
        k = len(self.arity)
        self.arity.append(arity)
        if k == len(self.answers):
            self.answers.append(0)
        return self.answers[k]

    def below(self, prob_B: Tensor, pos_B: Tensor, role: str) -> Tensor:
        answer = self._answer(2)
        prob_B = prob_B.double().clamp(0, 1)
        self.weight_B = self.weight_B * (prob_B if answer else 1 - prob_B)
        return torch.full(prob_B.shape, bool(answer))

    def draw(self, weight_BV: Tensor, pos_B: Tensor, role: str) -> Tensor:
        answer = self._answer(weight_BV.shape[1])
        self.weight_B = self.weight_B * weight_BV[:, answer].double() / weight_BV.sum(1).double()
        return torch.full((len(weight_BV),), answer)


def outcomes(run: Callable[[Rng], object], batch: int) -> Iterator[tuple[Tensor, object]]:
    """Every outcome of `run`, with its probability in each row: an odometer over all answers of its coins."""
    answers: list[int] = []
    while True:
        rng = EnumeratingRng(answers, batch)
        result = run(rng)
        yield rng.weight_B, result
        while answers and answers[-1] + 1 == rng.arity[len(answers) - 1]:
            answers.pop()
        if not answers:
            return
        answers[-1] += 1


def emitted(tree: TokenTree, verdict: Verdict) -> Tensor:
    """The tokens [B, P] that a cycle adds to each text; those beyond `verdict.n_B` repeat the last."""
    found = verdict.path_BP, verdict.n_B, verdict.next_B
    news_BX = verdict.path_BP.new_empty(len(verdict.path_BP), 2 + verdict.path_BP.shape[1])
    settle(tree.tokens_BN, found, tuple(verdict.n_B.clone() for _ in range(3)), news_BX)
    return news_BX[:, 2:]
