"""The head at work against its own module from scratch, and the texts that come of it."""

from __future__ import annotations

import pytest
import torch

from longtrain.artifact import Artifact
from longtrain.config import MethodChoice, RunConfig
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import Parts, TreeShape, Verdict
from longtrain.decoding.tree import chain
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.jobs import train
from longtrain.methods.eagle3.config import Config as Eagle3
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.runtime import Eagle3Runtime
from longtrain.methods.specontext.config import Config
from longtrain.methods.specontext.modules import RetrievalHead
from longtrain.methods.specontext.prune import pruned
from longtrain.methods.specontext.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import noisy

VARIANTS = {
    "shifted": Config(layers=[0, 1]),
    "two groups, own keys": Config(layers=[1], sets=2, share_keys=False, fc_norm=True),
    "two groups, shared keys": Config(layers=[0], sets=2, qk_norm=True, norm_before_fc=True),
    "embedding": Config(variant="embedding", conv=3),
    "lagged, of the feature's row": Config(variant="lagged", row="feature"),
    "its own shape": Config(layers=[0], n_heads=2, n_kv_heads=1, head_dim=8, mapping="calibrated"),
    "yarn": Config(
        layers=[0],
        rope={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
}
KEYS = {"budget_tokens": 14, "sinks": 2, "window": 4}


@pytest.fixture(scope="module")
def llama():
    return random_target("llama_micro", seed=1, dtype=torch.float64)


def head_of(config, target, dtype=torch.float64):
    """A head with weights large enough that every part matters."""
    return noisy(RetrievalHead(config, target.info).to(dtype))


def attached(config, target, **keys):
    return SPEC.attach(head_of(config, target, target.dtype), target, config, {**KEYS, **keys})


def texts_of(*lengths, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 97, (n,), generator=gen).tolist() for n in lengths]


@torch.no_grad()
def scores_of(head, config, target, text, root):
    """Scores of all rows of a text for its root, from one pass over the text; the target reads everything."""
    ids = torch.tensor([*text, root])
    n = len(text)
    hidden = target.packed(
        ids, torch.arange(n + 1), (0, n + 1), OutputRequest("none", hidden=head.hidden)
    ).hidden
    embed = target.embed(ids)
    rows = []
    for s in range(n + 1):
        if head.mix is None:
            states = [
                hidden[layer][s - 1] if s else torch.zeros_like(hidden[layer][0]) for layer in head.hidden
            ]
            rows.append(head.entry(embed[s], states))
        else:
            window = [embed[at] if at >= 0 else torch.zeros_like(embed[0]) for at in (s - 2, s - 1, s)]
            rows.append(head.entry(torch.stack(window), ()))
    rope = attached(config, target).selector._rope
    entry, turn = torch.stack(rows), rope(torch.arange(n + 1))
    q, k = head.query(entry, turn)[-1], head.key(entry, turn)
    groups, out = head.heads[1], []
    per = head.heads[0] // groups
    for x in range(head.sets):
        for g in range(groups):
            key = k[:, g if head.key_sets == 1 else x * groups + g]
            weights = [
                (q[x * head.heads[0] + g * per + h] @ key.T * head.dim**-0.5)[
                    slice(1, None) if config.row == "feature" else slice(0, n)
                ]
                for h in range(per)
            ]
            seen = n - 1 if config.row == "feature" else n
            out.append(torch.stack([w[:seen].log_softmax(0) for w in weights]).amax(0))
    return torch.stack(out)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_scores_are_those_of_the_module_from_scratch(name, llama):
    """Prompts of other lengths, chains accepted in part, a row that is over.

    The cache reads everything, so that the states are those of one pass.
    """
    config = VARIANTS[name]
    selector = attached(config, llama, budget_tokens=200, every=4).selector
    texts, roots = texts_of(29, 1, 7), torch.tensor([5, 6, 7])
    n_B = torch.tensor([len(text) for text in texts])
    ids = torch.tensor([[*text, *[0] * (29 - len(text))] for text in texts])
    cache = Engine(llama, Parts(selector=selector)).new_cache(3, 80, 4)
    outputs = OutputRequest("last", hidden=selector.outputs.hidden)
    step = llama.forward(TokenBatch(torch.arange(29).expand(3, -1), ids, n_B=n_B), cache, outputs=outputs)
    cache.commit(None, n_B)
    selector.start(ids, n_B, step, cache)
    for taken in ([3, 1, 2], [1, 0, 3], [2, 2, 2]):
        scores, due_B = selector.ahead(roots), cache.entry_sets.due(cache.len_B)
        for b, text in enumerate(texts):
            if not due_B[b]:
                assert scores[b].isneginf().all()
                continue
            want_XS = scores_of(selector.head, config, llama, text, int(roots[b]))
            torch.testing.assert_close(scores[b, :, : want_XS.shape[1]], want_XS, check_dtype=False)
        cache.choose(scores)
        tokens = torch.stack([roots, roots + 11, roots + 23], 1)
        pos = cache.len_B[:, None] + torch.arange(3)
        step = llama.forward(
            TokenBatch(pos, tokens), cache, outputs=OutputRequest("none", hidden=outputs.hidden)
        )
        n_B = torch.tensor(taken)
        cache.commit(None, n_B)
        selector.observe(chain(tokens), Verdict(torch.arange(3).expand(3, 3), n_B, roots), step)
        for b, count in enumerate(taken):
            texts[b] += tokens[b, :count].tolist()
        roots = (roots * 7 + 1) % 97


@pytest.mark.parametrize(
    "name", ["shifted", "two groups, own keys", "embedding", "lagged, of the feature's row"]
)
def test_speculation_repeats_the_sparse_text(name):
    """fp32: EAGLE-3 drafts, as chains and as trees; and a budget that texts fit changes nothing."""
    target = random_target("llama_micro", seed=1)
    config, prompts = VARIANTS[name], texts_of(70, 9, 40)
    options = {"max_new_tokens": 20, "ignore_eos": True}
    plain = Engine(target, attached(config, target, every=4)).generate(prompts, **options).tokens
    dense = Engine(target).generate(prompts, **options).tokens
    draft = Parts(draft=Eagle3Runtime(*drafted(target)), name="eagle3")
    both = attached(config, target, every=4).merge(draft)
    for shape in (TreeShape((1, 1, 1)), TreeShape((2, 4)), PLAIN):
        assert Engine(target, both).generate(prompts, shape=shape, **options).tokens == plain
    wide = attached(config, target, every=4, budget_tokens=100)
    assert Engine(target, wide).generate(prompts, **options).tokens == dense != plain


def drafted(target, **more):
    torch.manual_seed(3)
    config = Eagle3(layers=[0, 1], draft_vocab_size=0, **more)
    return Eagle3Draft(config, target.info).to(target.dtype), target, config


@torch.no_grad()
def test_a_pruned_head_has_the_queries_and_keys_of_the_draft(llama):
    """For the same pairs of token and feature; each group of layers begins with them."""
    draft, _, settings = drafted(llama)
    config = Config(layers=[0, 1], sets=2)
    head = RetrievalHead(config, llama.info).double()
    head.load_state_dict({**head.state_dict(), **pruned(config, draft.state_dict(), vars(settings))})
    states, embed = torch.randn(2, 6, 48).double(), torch.randn(6, 48).double()
    entry, _ = draft.enter(embed, draft.feature(list(states)))
    assert torch.equal(head.entry(embed, list(states)), entry)
    rope = llama.rope(torch.arange(6)[None])
    rope = tuple(part[0] for part in rope)
    q, (k, _) = draft.self_attn.query(entry, rope), draft.self_attn.keys_values(entry, rope)
    torch.testing.assert_close(head.query(entry, rope), torch.cat((q, q), 1))
    torch.testing.assert_close(head.key(entry, rope), k)
    embedding = Config(variant="embedding")
    found = pruned(embedding, draft.state_dict(), vars(settings))
    assert (
        torch.equal(found["q_proj.weight"], draft.self_attn.q_proj.weight[:, :48])
        and "fc.weight" not in found
    )
    with pytest.raises(ConfigError, match=r"pass method.qk_norm=True"):
        pruned(config, draft.state_dict(), {**vars(settings), "qk_norm": True})
    for one in (config, embedding):
        with pytest.raises(ConfigError, match=r"embeddings of its own \(own_embeddings=true\)"):
            pruned(one, draft.state_dict(), {**vars(settings), "own_embeddings": True})


def test_what_is_refused(llama):
    other = random_target("qwen3_micro", seed=1, dtype=torch.float64)
    with pytest.raises(ConfigError, match="a budget of 14 entries, of which 2 sinks and the last 40"):
        attached(Config(), llama, window=40)
    with pytest.raises(ConfigError, match=r"the budget is 0\.5 of the prompt"):
        attached(Config(), llama, budget_ratio=0.5)
    with pytest.raises(ConfigError, match="no inference key 'adaptive'"):
        attached(Config(), llama, adaptive=True)
    with pytest.raises(TargetMismatchError, match=r"method.layers=\[5\]; target .* allows 0..1"):
        RetrievalHead(Config(layers=[5]), llama.info)
    with pytest.raises(TargetMismatchError, match=r"method\.sets=3"):
        RetrievalHead(Config(sets=3), llama.info)
    with pytest.raises(TargetMismatchError, match=r"pass method\.mapping=calibrated"):
        RetrievalHead(Config(n_heads=1, n_kv_heads=1), llama.info)
    head = head_of(Config(), llama)
    with pytest.raises(TargetMismatchError, match=r"\(48, 2, 2, 16\); target .* asks for \(48, 2, 2, 32\)"):
        SPEC.attach(head, other, Config(), KEYS)
    with pytest.raises(TargetMismatchError, match=r"a retrieval head of \(hidden size, .*\) = \(48, 3, "):
        head.table_LG = torch.zeros(3, 2).long()
        SPEC.attach(head, other, Config(), KEYS)
    with pytest.raises(ConfigError, match=r"method.layers=.*null where method.variant=embedding"):
        Config(variant="embedding", layers=[1])


def test_init_takes_the_artifact_of_a_draft_and_no_other(tmp_path, caplog):
    """`init=DRAFT` of `train`: the kept weights arrive, the share of the draft is logged."""
    target = random_target("llama_micro", seed=1)
    draft, _, settings = drafted(target)
    Artifact.from_module("eagle3", settings, module=draft, target=target).save(
        tmp_path / "checkpoints" / "draft"
    )
    values = {"init": "draft", "home": str(tmp_path), "method": {"name": "specontext", "layers": [0, 1]}}
    cfg = RunConfig(values)
    head = RetrievalHead(Config(layers=[0, 1]), target.info)
    with caplog.at_level("INFO"):
        facts = train._load_init(cfg.init, cfg.artifact_source, cfg.method, head, target)
    assert facts["init"]["artifact"] == "draft"
    assert torch.equal(head.fc.weight, draft.fc.weight)
    assert torch.equal(head.k_proj.weight, draft.self_attn.k_proj.weight)
    kept = sum(p.numel() for p in head.parameters())
    whole = sum(p.numel() for p in draft.parameters())
    assert f"weights={kept} draft_weights={whole} share={kept / whole:.4f}" in caplog.text
    longspec = MethodChoice("longspec", {"name": "longspec"})
    with pytest.raises(ConfigError, match="trained by method=eagle3, this run is method=longspec"):
        train._load_init(cfg.init, cfg.artifact_source, longspec, head, target)
