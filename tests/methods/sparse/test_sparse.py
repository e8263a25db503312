"""Selection without training: each rule against its definition written out, and the same text however it is
decoded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from longtrain import methods
from longtrain.cache.entry_sets import ReadBudget, choose_entries
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.methods.sparse.clusters import k_means
from longtrain.methods.sparse.config import OPTIONS, Config
from longtrain.methods.sparse.rules import page_bounds
from longtrain.methods.sparse.spec import RULES, SPEC
from longtrain.systems import Builder
from longtrain.systems.system import System, without_draft
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.decoding.micro import prompts_of
from tests.decoding.micro import target as micro
from tests.decoding.toys import OracleDraft

KEYS = {"budget_tokens": 14, "sinks": 2, "window": 4, "every": 5}
PROMPTS = prompts_of(90, 7, 61)
NEW = 16
SMALL = {
    "clusterkv": {"cluster_tokens": 8, "cluster_every": 6, "new_clusters": 2},
    "shadowkv": {"outliers": 0.2},
    "reused": {"layer": 1},
    "shared_oracle": {"groups": 2},
}


def parts_of(rule, target=None, keys=KEYS, **options):
    config = Config(rule, **{**SMALL.get(rule, {}), **options})
    return SPEC.attach(None, target or micro(), config, dict(keys))


def generate(parts, prompts=PROMPTS, target=None, **options):
    options = {"max_new_tokens": NEW, "ignore_eos": True, **options}
    return Engine(target or micro(), parts).generate(prompts, **options)


@pytest.mark.parametrize("rule", RULES)
def test_the_text_does_not_depend_on_speculation_or_on_other_texts(rule):
    target = micro(dtype=torch.float32)
    plain = generate(parts_of(rule, target), target=target).tokens
    assert plain[0] != generate(None, target=target).tokens[0]
    drafted = Parts(draft=OracleDraft(target, noise=0.5), selector=parts_of(rule, target).selector)
    assert generate(drafted, target=target, shape=TreeShape((3, 4, 2))).tokens == plain
    assert generate(parts_of(rule, target), PROMPTS[2:], target=target).tokens == plain[2:]


def started(rule, keys, **options):
    """A rule after a prompt of random keys: (rule, q_BHTD, k_BGSD, len_B)."""
    torch.manual_seed(0)
    target = micro()
    parts = parts_of(rule, target, keys, **options)
    engine = Engine(target, parts)
    cache = engine.new_cache(2, 80, 1)
    cache.store.k_LBGSD.normal_()
    cache.store.len_B[:] = torch.tensor([70, 53])
    cache.store._low, cache.store._high = 53, 70
    cache.len_B = cache.store.len_B
    parts.selector.start(torch.zeros(2, 70, dtype=torch.int64), torch.tensor([61, 40]), None, cache)
    q = torch.randn(2, target.info.n_heads, 1, target.info.head_dim, dtype=torch.float64)
    return parts.selector, q, cache.keys(1), cache.len_B


def rows_of(rule, rows=30, **options):
    """Sets of layer 1 that a rule chooses, as Python sets [b][g]; and what they were chosen from."""
    selector, q, k, len_B = started(rule, {**KEYS, "budget_tokens": rows}, **options)
    found = choose_entries(selector.at_layer(1, q, k, len_B), len_B, selector.budget)
    return [[set(one.tolist()) for one in two] for two in found], q[:, :, 0], k, len_B.tolist()


def expected(scores_S, length, rows=30):
    """Sinks, window and the best of the others; of equal ones the later."""
    forced = {0, 1, *range(length - 4, length)}
    order = sorted(set(range(length)) - forced, key=lambda s: (-float(scores_S[s]), -s))
    return forced | set(order[: rows - len(forced)])


def check(found, scores):
    """`scores(b, g, length)` gives a score for each row."""
    sets, _, k, lengths = found
    for b, length in enumerate(lengths):
        for g in range(k.shape[1]):
            assert sets[b][g] == expected(scores(b, g, length), length)


def heads_of(q, k, b, g):
    """The queries of a KV head."""
    size = q.shape[1] // k.shape[1]
    return q[b, g * size : (g + 1) * size]


def weights(q_HD, k_SD):
    return (q_HD @ k_SD.T / math.sqrt(k_SD.shape[1])).softmax(-1).sum(0)


def test_window_is_the_last_rows():
    check(rows_of("window"), lambda b, g, n: range(n))


def test_random_draws_anew_for_each_head_and_position():
    sets, *_ = rows_of("random")
    assert sets == rows_of("random")[0] != rows_of("random", seed=1)[0]
    assert len({frozenset(one) for two in sets for one in two}) == 4
    assert all({0, 1, *range(n - 4, n)} < one and len(one) == 30
               for two, n in zip(sets, (70, 53), strict=True) for one in two)  # fmt: skip


@pytest.mark.parametrize("prompt_only", [False, True])
def test_quest_reads_pages_by_the_papers_bound(prompt_only):
    """Algorithm 1 of the paper, page by page and number by number."""
    found = rows_of("quest", page=8, prompt_only=prompt_only)
    _, q, k, _ = found

    def scores(b, g, length):
        pages = []
        for start in range(0, length, 8):
            keys = k[b, g, start : min(start + 8, length)]
            low, high = keys.min(0).values, keys.max(0).values
            bounds = [
                sum(max(float(x * a), float(x * z)) for x, a, z in zip(one, low, high, strict=True))
                for one in heads_of(q, k, b, g)
            ]
            pages += [sum(bounds) / len(bounds)] * len(keys)
        return [math.inf if prompt_only and s >= (61, 40)[b] else x for s, x in enumerate(pages)]

    check(found, scores)


def test_quest_bound_is_that_of_sparse_attention_hub():
    """The rule of skylight-org/sparse-attention-hub (`quest_utils`): sum over dims of max(q * min, q * max),
    each KV head repeated for its query heads, a short last page reduced over the rows that it has."""
    torch.manual_seed(1)
    q, k = torch.randn(2, 8, 16), torch.randn(2, 4, 70, 16)
    found = page_bounds(q, k, torch.tensor([70, 70]), 16)
    repeated = k.repeat_interleave(2, 1)
    low, high = (
        torch.stack([getattr(torch, f"a{kind}")(one, 2) for one in repeated.split(16, 2)], 2)
        for kind in ("min", "max")
    )
    outputs = torch.maximum(q[:, :, None] * low, q[:, :, None] * high).sum(-1)
    torch.testing.assert_close(found, outputs)
    exact = (q[:, :, None] * repeated).sum(-1)
    assert (found.repeat_interleave(16, -1)[..., :70] >= exact - 1e-4).all()


def test_clusterkv_reads_clusters_in_the_order_of_their_centroids():
    """The prompt's clusters, those of two stretches of generated rows, and rows that wait."""
    options = {"cluster_tokens": 8, "cluster_every": 4, "new_clusters": 2}
    found = rows_of("clusterkv", **options)
    _, q, k, _ = found

    def scores(b, g, length):
        prompt, out = (61, 40)[b], [math.inf] * length
        ends = [prompt, *range(prompt + 4, length + 1, 4)]
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            keys = k[b, g, start:end]
            count = prompt // 8 if start == 0 else 2
            label, centroid = k_means(keys[None], count, 10)
            for s in range(start, end):
                c = int(label[0, s - start])
                out[s] = float((heads_of(q, k, b, g) @ centroid[0, c]).mean())
        return out

    check(found, scores)
    assert found[0] != rows_of("clusterkv", **options, prompt_only=True)[0]


def test_k_means_finds_directions():
    """Each row ends at its nearest centroid, and a centroid is the mean of its rows."""
    torch.manual_seed(2)
    directions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    keys = (directions.repeat(20, 1) + 0.1 * torch.randn(60, 2)) * (1 + torch.rand(60, 1))
    label, centroid = k_means(keys[None], 3, 50)
    assert [len(set(label[0, i::3].tolist())) for i in range(3)] == [1, 1, 1]
    for c in range(3):
        torch.testing.assert_close(centroid[0, c], keys[label[0] == c].mean(0))
    near = (normalize(keys, dim=-1) @ normalize(centroid[0], dim=-1).T).argmax(-1)
    assert torch.equal(near, label[0])
    one, _ = k_means(keys[None, :2], 5, 3)
    assert one.tolist() == [[0, 1]]


def test_shadowkv_reads_chunks_by_their_means_and_outliers_in_any_case():
    found = rows_of("shadowkv", chunk=4, outliers=0.2)
    _, q, k, _ = found
    special = 0

    def scores(b, g, length):
        nonlocal special
        chunks = [k[b, g, start : start + 4] for start in range(0, length - 3, 4)]
        marks = torch.stack([one.mean(0) for one in chunks])
        share = (heads_of(q, k, b, g) @ marks.T / 4).softmax(-1).amax(0)
        alike = [float(cosine_similarity(one, one.mean(0), dim=-1).min()) for one in chunks]
        prompt = (61, 40)[b] // 4
        worst = sorted(range(prompt), key=alike.__getitem__)[: round(0.2 * prompt)]
        special += len(worst)
        share[worst] = math.inf
        return [*share.repeat_interleave(4).tolist(), *[math.inf] * (length % 4)]

    check(found, scores)
    assert special == 2 * 3 + 2 * 2


def test_oracle_reads_what_the_query_attends_to():
    found = rows_of("oracle")
    _, q, k, _ = found
    check(found, lambda b, g, n: weights(heads_of(q, k, b, g), k[b, g, :n]))


class Watched:
    """What a rule was shown and what it said, step by step."""

    def __init__(self, selector):
        self.selector, self.seen, self.said = selector, [], []
        self.inner = selector.at_layer

    def __call__(self, layer, q, k, len_B):
        scores = self.inner(layer, q, k, len_B)
        if layer == 0:
            self.seen.append({})
            self.said.append({})
        self.seen[-1][layer] = (q[0, :, 0].clone(), k[0, :, : int(len_B[0])].clone())
        self.said[-1][layer] = scores[0, :, : int(len_B[0])]
        return scores


@pytest.mark.parametrize("rule", ["previous", "reused"])
def test_rules_that_look_at_other_steps_and_layers(rule):
    """`previous`: the query of the step before, over the rows of this one. `reused`: layer 1's query, of this
    step from layer 1 on and of the step before in layer 0."""
    parts = parts_of(rule)
    hook = parts.selector.at_layer = Watched(parts.selector)
    generate(parts, PROMPTS[:1], max_new_tokens=5)
    for layer in (0, 1):
        rows = hook.seen[0][0][1].shape[1]
        if (rule, layer) != ("reused", 1):
            assert hook.said[0][layer].tolist() == [list(range(rows))] * 2
    for before, now, said in zip(hook.seen, hook.seen[1:], hook.said[1:], strict=False):
        for layer in (0, 1):
            of = 1 if rule == "reused" else layer
            q = (now if (rule, layer) == ("reused", 1) else before)[of][0]
            keys = now[of][1]
            if (rule, layer) == ("reused", 0):
                keys = keys[:, : said[0].shape[1]]
            outputs = torch.stack([weights(heads_of(q[None], keys[None], 0, g), keys[g]) for g in range(2)])
            torch.testing.assert_close(said[layer], outputs)


@pytest.mark.parametrize("options", [{"groups": 1}, {"groups": 2}, {"groups": 1, "all_heads": True}])
def test_the_shared_oracle_sums_over_its_layers(options):
    """Of a dense step over the root, whatever the sparse step then reads; each layer alone is the oracle."""
    target = micro()
    selector = parts_of("shared_oracle", target, **options).selector
    assert (
        selector.table_LG.tolist()
        == {
            1: [[0, 0], [0, 0]] if "all_heads" in options else [[0, 1], [0, 1]],
            2: [[0, 1], [2, 3]],
        }[options["groups"]]
    )
    seen = []
    said = []
    ahead = selector.ahead

    def look(root_B):
        scores = ahead(root_B)
        said.append(scores[0, :, : int(selector.cache.len_B[0])])
        return scores

    selector.ahead = look
    text = generate(Parts(selector=selector), PROMPTS[:1], max_new_tokens=2).tokens[0]
    full = [*PROMPTS[0], text[0]]
    ids = torch.tensor([full])
    cache = target.new_cache(1, len(full), 1)
    target.forward(
        TokenBatch(torch.arange(len(full))[None], ids), cache, outputs=OutputRequest("none"),
        hook=lambda layer, q, k, v: seen.append((q[0, :, -1], k[0])),
    )  # fmt: skip
    outputs = torch.zeros_like(said[0])
    for layer, (q, k) in enumerate(seen):
        for g in range(2):
            logits = heads_of(q[None], k[None], 0, g) @ k[g, :-1].T / math.sqrt(k.shape[-1])
            outputs[selector.table_LG[layer, g]] += logits.softmax(-1).sum(0)
    torch.testing.assert_close(said[0], outputs)


def test_settings_and_systems():
    assert set(RULES) == set(OPTIONS) and methods.get("sparse") is SPEC
    with pytest.raises(ConfigError, match=r"method.page=8 is no option of method.rule=oracle; .*: none"):
        Config("oracle", page=8)
    with pytest.raises(ConfigError, match=r"method\.rule"):
        Config("best")
    with pytest.raises(ConfigError, match=r"method.layer=7; allowed: 0 to 1"):
        parts_of("reused", layer=7)
    with pytest.raises(ConfigError, match=r"method.groups=3; allowed: 1 to 2"):
        parts_of("shared_oracle", groups=3)
    builder = Builder(micro(), [Budget(80), Budget(100)], [TreeShape((1, 1))], load=None)
    quest = {"name": "sparse", "rule": "quest"}
    drafted = [{"method": "prompt_lookup"}, {"method": {**quest, "page": 8}, "label": "quest 8"}]
    found = builder.systems([quest, *drafted, {"name": "sparse", "rule": "oracle"}])
    assert [one.name for one in found if one.selects] == [
        "sparse rule=quest@80", "sparse rule=quest@100", "quest 8@80", "quest 8@100",
        "sparse rule=oracle@80", "sparse rule=oracle@100",
    ]  # fmt: skip
    assert found[1].parts.selector.budget == ReadBudget(rows=80)


def test_a_drafted_text_is_compared_with_that_of_the_same_rule():
    def system(name, rule, **more):
        facts = {"artifacts": [], "method": {"name": "sparse", "rule": rule}, "budget": "80"}
        return System(
            name, "combined", name, parts=Parts(selector=parts_of(rule).selector, **more), facts=facts
        )

    plain = [system("a", "quest"), system("b", "oracle")]
    draft = OracleDraft(micro())
    for one in plain:
        rule = one.facts["method"]["rule"]
        drafted = replace(system("drafted", rule, draft=draft), shape=TreeShape((1,)))
        assert without_draft(drafted, plain) == one.name
