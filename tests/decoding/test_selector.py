"""Decoding from chosen rows: against a plain loop with masks, and the same text however it is decoded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.cache.entry_sets import ReadBudget, choose_entries
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.retrieval.scores import group_scores, head_weights
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, ConflictError
from longtrain.evaluation.harness.rounding import Passage, logits_at_once, logits_in_steps
from longtrain.evaluation.perplexity import predicted_logits, read_contexts
from longtrain.kernels.tree_attention.reference import masked_attention
from longtrain.targets.step import OutputRequest

from .micro import prompts_of, snapkv
from .micro import target as micro
from .toys import OracleDraft

BUDGET = ReadBudget(rows=14, sinks=2, window=4, every=5)
PROMPTS = prompts_of(90, 7, 33)
NEW = 24


class ByState(Selector):
    """Scores a row by the state that its token left, against that of the last token and the root: what a head
    with shifted features knows. Two sets, the second by other numbers."""

    name = "by state"
    outputs = OutputRequest(hidden=(0,))

    def __init__(self, budget, target):
        super().__init__(budget)
        self.target = target
        self.table_LG = torch.tensor([[0, 1], [1, 1]])

    def start(self, tokens_BS, n_B, step, cache):
        super().start(tokens_BS, n_B, step, cache)
        B, S, E = step.hidden[0].shape
        self.state_BSE = step.hidden[0].new_zeros(B, S + NEW + 40, E)
        self.state_BSE[:, :S] = step.hidden[0]

    def ahead(self, root_B):
        row_B = torch.arange(len(root_B))
        q_BE = self.state_BSE[row_B, self.cache.len_B - 1] + self.target.embed(root_B)
        states = torch.stack([self.state_BSE, self.state_BSE.sin()], 1)
        return (states @ q_BE[:, None, :, None])[..., 0]

    def observe(self, tree, verdict, step):
        for b, n in enumerate(verdict.n_B.tolist()):
            first = int(self.cache.len_B[b]) - n
            self.state_BSE[b, first : first + n] = step.hidden[0][b, verdict.path_BP[b, :n]]


class ByQuery(Selector):
    """The rows that the root attends to, each layer and KV head its own: the per-layer oracle."""

    name = "by query"

    def at_layer(self, layer, q_BHTD, k_BGSD, len_B):
        visible_BS = torch.arange(k_BGSD.shape[2]) < len_B[:, None]
        weights = head_weights(q_BHTD[:, :, 0], k_BGSD, visible_BS, scale=q_BHTD.shape[-1] ** -0.5)
        return group_scores(weights, k_BGSD.shape[1])


def made(kind, budget=BUDGET, target=None):
    return ByQuery(budget) if kind == "query" else ByState(budget, target or micro())


def generate(parts, prompts=PROMPTS, *, target=None, **options):
    options = {"max_new_tokens": NEW, "ignore_eos": True, **options}
    return Engine(target or micro(), parts).generate(prompts, **options)


@torch.no_grad()
def by_hand(kind, prompt, target):
    """One text, token by token, every pass over the whole text with a mask of what each position reads."""
    budget, reads, text = BUDGET, {}, list(prompt)
    G = target.info.n_kv_heads

    def states(ids):
        """Logits of the last row, layer 0's outputs, and the last row's queries and all keys by layer."""
        seen = {}
        x_TE = target.embed(torch.tensor(ids))
        cos, sin = target.rope(torch.arange(len(ids))[None])
        outputs = []
        for layer, block in enumerate(target.model.model.layers):
            attention = block.self_attn
            h = block.input_layernorm(x_TE)
            q, k, v = (p(h).unflatten(-1, (-1, 16)).transpose(0, 1)[None] for p in (
                attention.q_proj, attention.k_proj, attention.v_proj))  # fmt: skip
            half = torch.cat((-q[..., 8:], q[..., :8]), -1), torch.cat((-k[..., 8:], k[..., :8]), -1)
            q, k = q * cos[:, None] + half[0] * sin[:, None], k * cos[:, None] + half[1] * sin[:, None]
            seen[layer] = (q[0, :, -1], k[0])
            if (layer, len(ids) - 1) not in reads and len(ids) > len(prompt):
                choose(layer, len(ids) - 1, outputs, ids, q[0, :, -1], k[0])
            mixed = []
            for g in range(G):
                mask = torch.ones(len(ids), len(ids)).tril().bool()
                for at in range(len(prompt), len(ids)):
                    since, rows = reads[layer, at][g]
                    mask[at, :since] = False
                    mask[at, rows] = True
                heads, one = slice(2 * g, 2 * g + 2), slice(g, g + 1)
                mixed.append(masked_attention(q[:, heads], k[:, one], v[:, one], mask[None], scale=0.25)[0])
            x_TE = x_TE + attention.o_proj(torch.cat(mixed, 1)[0].transpose(0, 1).flatten(1))
            x_TE = x_TE + block.mlp(block.post_attention_layernorm(x_TE))
            outputs.append(x_TE)
        return target.head(target.model.model.norm(x_TE[-1])), outputs[0]

    def choose(layer, at, outputs, ids, q_HD, k_GSD):
        for g in range(G):
            since = at - (at - len(prompt)) % budget.every
            if since < at:
                reads.setdefault((layer, at), {})[g] = reads[layer, at - 1][g]
                continue
            if kind == "query":
                weights = head_weights(q_HD, k_GSD[:, :at], torch.ones(at).bool(), scale=0.25)
                scores = group_scores(weights, G)[g]
            else:
                known = states(ids[:at])[1]
                q_E = known[at - 1] + target.embed(torch.tensor(ids[at]))
                scores = (known.sin() if (layer, g) != (0, 0) else known) @ q_E
            idx = choose_entries(scores[None, None], torch.tensor([at]), budget)[0, 0, : min(at, budget.rows)]
            reads.setdefault((layer, at), {})[g] = (at, idx)

    for _ in range(NEW):
        text.append(int(states(text)[0].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("kind", ["query", "state"])
def test_the_text_is_that_of_a_plain_loop_with_masks(kind):
    target = micro()
    found = generate(Parts(selector=made(kind)), PROMPTS[:2]).tokens
    assert found == [by_hand(kind, prompt, target) for prompt in PROMPTS[:2]]
    assert found != generate(None, PROMPTS[:2]).tokens


@pytest.mark.parametrize("kind", ["query", "state"])
def test_speculation_repeats_the_text(kind):
    """Chains and trees that are partly right, over the edges of sets and in texts of other lengths."""
    target = micro(dtype=torch.float32)
    plain = generate(Parts(selector=made(kind, target=target)), target=target)
    assert plain.tokens != generate(None, target=target).tokens
    for shape in (TreeShape((3, 4, 2)), TreeShape((1,) * 7)):
        parts = Parts(draft=OracleDraft(target, noise=0.5), selector=made(kind, target=target))
        drafted = generate(parts, target=target, shape=shape)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.target_forwards < plain.stats.target_forwards
        assert generate(parts, target=target, shape=PLAIN).tokens == plain.tokens


@pytest.mark.parametrize("kind", ["query", "state"])
def test_a_text_does_not_depend_on_those_beside_it(kind):
    together = generate(Parts(selector=made(kind))).tokens
    alone = [generate(Parts(selector=made(kind)), [prompt]).tokens[0] for prompt in PROMPTS]
    assert together == alone


@pytest.mark.parametrize("kind", ["query", "state"])
def test_a_budget_that_texts_fit_changes_nothing(kind):
    """Greedy and sampled; rows that are read after the prompt are read whole."""
    wide = replace(BUDGET, rows=200)
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=2)):
        options = {"sampling": sampling, "after": prompts_of(3, 9, 2)}
        found, dense = (generate(parts, **options) for parts in (Parts(selector=made(kind, wide)), None))
        assert found.tokens == dense.tokens


def test_sampled_speculation_with_point_drafts_repeats_the_sampled_text():
    warm = Sampling(temperature=0.9, seed=5)
    plain = generate(Parts(selector=made("state")), sampling=warm).tokens
    parts = Parts(draft=OracleDraft(micro(), noise=0.5), selector=made("state"))
    assert generate(parts, sampling=warm, shape=TreeShape((2, 2), ChildChoice.POINT)).tokens == plain


def test_what_does_not_go_together():
    rule = made("state")
    with pytest.raises(ConflictError, match="evict entries"):
        Engine(micro(), Parts(evictor=snapkv(20), selector=rule, name="both"))
    with pytest.raises(ConflictError, match="both bring the engine's selector"):
        Parts(selector=rule, name="a").merge(Parts(selector=rule, name="b"))
    with pytest.raises(ConfigError, match=r"select.every=1.*pass select.every=8"):
        once = made("state", replace(BUDGET, every=1))
        generate(Parts(draft=OracleDraft(micro()), selector=once))
    with pytest.raises(ConflictError, match="DenseCache cannot read selected ones"):
        generate(Parts(cache=micro().new_cache, selector=rule))
    with pytest.raises(ConflictError, match="the selector of 'head' does not update its state in place"):
        Engine(micro(), Parts(selector=rule, name="head"), capture=True).generate([[1]], max_new_tokens=2)
    with pytest.raises(ConfigError, match=r"the budget is 0.1 of the prompt"):
        rule.with_budget(Budget(ratio=0.1))
    with pytest.raises(ConfigError, match="a budget of 6 entries, of which 2 sinks and the last 4"):
        rule.with_budget(Budget(6))
    assert rule.with_budget(Budget(9)).budget.rows == 9 and rule.budget.rows == 14


def test_rules_for_kinds_of_attention():
    """MHA, GQA and MQA against sums written out."""
    q, k = torch.randn(3, 8, 16), torch.randn(3, 4, 10, 16)
    visible = torch.arange(10) < torch.tensor([[10], [4], [1]])
    weights = head_weights(q, k, visible, scale=0.25)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 8))
    for b, h in ((0, 0), (1, 5), (2, 7)):
        row = torch.tensor([float(q[b, h] @ k[b, h // 2, s]) * 0.25 for s in range(10)])
        row[~visible[b]] = -torch.inf
        torch.testing.assert_close(weights[b, h], row.softmax(0))
    for groups in (8, 4, 1):
        found = group_scores(weights, groups)
        size = 8 // groups
        outputs = torch.stack([weights[:, g * size : (g + 1) * size].max(1).values for g in range(groups)], 1)
        assert torch.equal(found, outputs)


@pytest.mark.parametrize("kind", ["query", "state"])
def test_a_text_that_is_given_is_read_as_a_text_that_is_decoded(kind):
    """Each token of a greedy text is the likeliest when the text is given, in steps of a set's stretch."""
    target = micro()
    texts = generate(Parts(selector=made(kind))).tokens
    found = {}
    parts = Parts(selector=made(kind))
    read = read_contexts(target, parts, PROMPTS, scored=texts)
    for row, at, logits_TV in predicted_logits(target, read, texts, selector=parts.selector):
        found[row, at] = logits_TV.argmax(-1).tolist()
    for row, text in enumerate(texts):
        said = [token for (b, _), tokens in sorted(found.items()) if b == row for token in tokens]
        assert said == text
    assert max(map(len, found.values())) == BUDGET.every
    passage = Passage(PROMPTS[0], texts[0][:10], first=5)
    for again in (
        logits_at_once(target, Parts(selector=made(kind)), passage),
        logits_in_steps(target, Parts(selector=made(kind)), passage, rows=1),
    ):
        assert again.argmax(-1).tolist() == texts[0][5:10]
