"""Documents in a view: the target gives what it gives when it decodes on that cache, and losses follow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from longtrain.data.rows.batch import Batch
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.methods import get
from longtrain.methods import viewed as viewed_module
from longtrain.methods import views as views_module
from longtrain.methods.eagle3 import objective as eagle3_objective
from longtrain.methods.longspec import indices
from longtrain.methods.target_cache import named_cache
from longtrain.methods.viewed import viewed
from longtrain.methods.views import draw, in_views, views_of
from longtrain.targets.loading import random_target
from longtrain.targets.step import Want

SHAPE = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
VIEWS = {
    "snapkv": {"policy": {"name": "snapkv", "window": 8}, "budget": 0.2},
    "uneven heads": {"policy": {"name": "adakv", "over": "snapkv", "options": {"window": 8}}, "budget": 60},
    "uneven layers": {"policy": {"name": "pyramidkv", "window": 8}, "budget": 0.2},
    "int8": {"cache": "int8"},
    "int4": {"cache": "int4"},
    "rounded": {"cache": {"name": "rounded", "bits": 4, "keys": "token"}},
}
EVERYTHING = {"policy": "snapkv", "budget": 1.0}
"""A view that evicts nothing."""
PROMPT, NEW = 350, 44
"""One block of 128 tokens is quantised with the prompt, another on the way."""
SMALL = {
    "eagle3": {"layers": [0, 1], "draft_vocab_size": 0, "depths": 3, "intermediate_size": 40},
    "longspec": {"window": 12, "kv_source_layer": 1, "guard_every": 0},
}


@pytest.fixture(scope="module")
def target():
    return random_target(SHAPE, seed=2, dtype=torch.float64)


def draft_of(target, method, **options):
    """A random draft whose every part matters, and its settings."""
    spec = get(method)
    config = spec.config(**{**SMALL[method], "warm_start": False, **options})
    draft, coins = spec.build(config, target.info).double(), torch.Generator().manual_seed(5)
    for name, p in draft.named_parameters():
        noise = torch.randn(p.shape, generator=coins, dtype=torch.float64)
        p.data = 1 + 0.2 * noise if "norm" in name else noise * 0.25
    return draft, config


def parts_of(target, view, draft=None):
    """What an engine needs to decode on a view's cache."""
    cache = None if view.cache is None else named_cache(view.cache, target)
    return Parts(draft=draft, evictor=view.evictor, cache=cache, name="view")


def prompt_of(seed=0, length=PROMPT):
    return torch.randint(2, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answered(tokens, prompt=PROMPT):
    """A row of one document whose prompt has no labels."""
    mask = torch.arange(len(tokens)) >= prompt
    return Batch(torch.tensor(tokens), (0, len(tokens)), mask, seed=1, tokens_in_step=int(mask.sum()))


def decoded(target, view, draft=None, **how):
    engine = Engine(target, parts_of(target, view, draft))
    return engine.generate([prompt_of()], max_new_tokens=NEW, ignore_eos=True, **how).tokens[0]


@pytest.mark.parametrize("name", VIEWS)
def test_eagle3_is_trained_on_the_states_that_decoding_gives(target, name):
    """Every row that the engine hands its draft, and texts are those of plain decoding on the same cache."""
    (view,) = views_of([VIEWS[name]])
    draft, config = draft_of(target, "eagle3")
    runtime = get("eagle3").attach(draft, target, config, {}).draft
    found = {layer: [] for layer in config.layers}
    start, observe = runtime.start, runtime.observe

    def starting(tokens_BS, n_B, step, cache):
        for layer, states in found.items():
            states.append(step.hidden[layer][0])
        start(tokens_BS, n_B, step, cache)

    def observing(tree, verdict, step):
        for layer, states in found.items():
            states.append(step.hidden[layer][0, verdict.path_BP[0, : verdict.n_B[0]]])
        observe(tree, verdict, step)

    runtime.start, runtime.observe = starting, observing
    new = decoded(target, view, runtime, shape=TreeShape((1, 1)))
    assert new == decoded(target, view, shape=PLAIN)
    batch = answered([*prompt_of(), *new])
    drawn = draw([view], batch)
    assert drawn[0].start == PROMPT
    want = Want("none", hidden=(0, 1, -1))
    step, _ = viewed(target, batch, torch.arange(len(batch.ids_T)), want, drawn)
    plain = target.packed(batch.ids_T, torch.arange(len(batch.ids_T)), batch.bounds, want)
    for layer, states in found.items():
        decoding, rows = torch.cat(states), PROMPT + NEW - 1  # the last token is never read
        torch.testing.assert_close(step.hidden[layer][:rows], decoding[:rows], rtol=1e-9, atol=1e-10)
        late = (step.hidden[layer] - plain.hidden[layer])[PROMPT:].abs().amax(-1)
        assert layer == 0 or late.min() > 1e-6  # the view does change what is seen
    law = target.head(step.hidden[-1][PROMPT - 1 : -1]).argmax(-1)
    assert law.tolist() == new  # the teacher is the target as it decodes


@pytest.mark.parametrize("name", VIEWS)
def test_longspec_reads_the_keys_that_the_engine_gives_it(target, name, monkeypatch):
    """The draft's states at every depth of every cycle, with the text's own tokens drafted."""
    (view,) = views_of([VIEWS[name]])
    draft, config = draft_of(target, "longspec", views=[VIEWS[name]], max_depth=3)
    text = [*prompt_of(), *decoded(target, view)]
    runtime = get("longspec").attach(draft, target, config, {}).draft
    found, propose = [], runtime.propose

    def proposing(root_B, *rest):
        levels = []

        def head(hidden_NE):
            root = int(runtime.cache.len_B)
            levels.append(hidden_NE)
            found.append((root, len(levels), hidden_NE[0]))
            token = text[min(root + len(levels), len(text) - 1)]
            return torch.nn.functional.one_hot(torch.tensor([token]), 61).double()

        runtime._head = head
        return propose(root_B, *rest)

    runtime.propose = proposing
    assert decoded(target, view, runtime, shape=TreeShape((1, 1, 1))) == text[PROMPT:]
    cycles = {root for root, _, _ in found}
    assert len(cycles) < 15 and min(cycles) == PROMPT  # drafts were accepted
    for shift in (1, 2, 3):
        monkeypatch.setattr(indices, "draw_shifts", lambda n, shift=shift, **_: [shift] * n)
        objective = get("longspec").objective(draft, target, config)
        row = objective._read(answered(text))
        assert row.rows_W[:2].tolist() == [PROMPT - 1, PROMPT + shift - 1]
        hidden_TE = objective._draft(row, 0, len(text))
        compared = [
            (hidden_TE[root + level - 1], state)
            for root, level, state in found
            if level == shift and root + level <= len(text)
        ]
        assert len(compared) > 9
        for one, other in compared:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_an_autocast_of_training_does_not_reach_a_view():
    target, (view,) = random_target(SHAPE, seed=2, dtype=torch.float32), views_of([VIEWS["snapkv"]])
    batch, want = row_of([90], prompts=[70]), Want("none", (-1,))
    found = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found.append(viewed(target, batch, torch.arange(90), want, draw([view], batch))[0].hidden[-1])
    assert torch.equal(*found)


def gradients(target, method, batch, **options):
    draft, config = draft_of(target, method, **options)
    loss = get(method).objective(draft, target, config)(batch)
    loss.total.backward()
    return loss, torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])


def row_of(lengths, prompts=(), seed=7):
    """Documents of random tokens; those with a prompt have no labels in it."""
    coins, bounds = torch.Generator().manual_seed(seed), [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    mask = torch.ones(bounds[-1], dtype=torch.bool)
    for a, prompt in zip(bounds, prompts, strict=False):
        mask[a : a + prompt] = False
    mask[bounds[:-1]] = False
    ids = torch.randint(2, 61, (bounds[-1],), generator=coins)
    return Batch(ids, tuple(bounds), mask, seed=seed, tokens_in_step=int(mask.sum()))


@pytest.mark.parametrize("method", SMALL)
@pytest.mark.parametrize("offset", [False, True])
def test_a_view_that_evicts_nothing_changes_nothing(target, method, offset, monkeypatch):
    """Loss and gradient through the engine's prefill are those of the packed pass."""
    batch = row_of([60, 41, 2, 150], prompts=[20])
    options = {"anchor_offset": offset, "offset_max_doc_tokens": 10}  # no document is short enough to move
    labels_of = eagle3_objective.labels_of
    monkeypatch.setattr(eagle3_objective, "labels_of", lambda *a, cuts, **k: labels_of(*a, **k))
    monkeypatch.setattr(indices, "of_one_view", lambda rows_W, cuts: torch.ones_like(rows_W).bool())
    plain, want = gradients(target, method, batch, **options)
    same, got = gradients(target, method, batch, views=[EVERYTHING], **options)
    torch.testing.assert_close(same.total, plain.total, rtol=1e-11, atol=0)
    assert ((got - want).norm() / want.norm()) <= 1e-10
    assert same.tokens == plain.tokens
    assert len(draw(views_of([EVERYTHING]), batch)) == 3
    assert int(same.figures["in_views"][0]) == 0 and "in_views" not in plain.figures
    listed, bits = gradients(target, method, batch, views=["full"], **options)
    assert torch.equal(listed.total, plain.total) and torch.equal(bits, want)


@pytest.mark.parametrize("method", SMALL)
def test_chunked_equals_whole_in_views(target, method):
    """Documents in several views and in full, of which chunks cut all."""
    batch = row_of([300, 40, 330, 280], prompts=[260, 0, 200])
    views = [*VIEWS.values(), "full"]
    shapes = {"anchor_offset": True, "offset_max_tokens": 2000, "views": views}
    options = views_of(views)
    seeds = [seed for seed in range(60) if len(draw(options, replace(batch, seed=seed))) == 3]
    for seed in seeds[:3]:
        row = replace(batch, seed=seed)
        whole, want = gradients(target, method, row, chunk_tokens=0, **shapes)
        part, got = gradients(target, method, row, chunk_tokens=48, **shapes)
        torch.testing.assert_close(part.total, whole.total, rtol=1e-12, atol=0)
        assert ((got - want).norm() / want.norm()) <= 1e-10


def test_rows_of_the_prompt_predict_no_label_of_the_view():
    """Behind a cut at row 6 only row 5, which knows the token there, and later rows predict labels."""
    mask = torch.ones(12, dtype=torch.bool)
    labels = eagle3_objective.labels_of(mask, (0, 12), depths=3, chunk_tokens=0, cuts=[6])
    token_W, row_JW = labels.predicted(0, 12)
    pairs = {(int(r), int(t)) for rows in row_JW for r, t in zip(rows, token_W, strict=True) if r >= 0}
    chains = {(row, row + 2 + k) for row in range(10) for k in range(3) if row + 2 + k < 12}
    assert pairs == {(row, token) for row, token in chains if row >= 5 or token <= 6}
    rows_W = torch.arange(12)
    assert rows_W[~indices.of_one_view(rows_W, [(6, 3)])].tolist() == [6, 7]
    assert indices.of_one_view(rows_W, [(6, 1)]).all()


def test_views_follow_from_the_row_alone():
    batch = row_of([400, 300, 500, 250, 30, 3], prompts=[0, 280, 499, 0, 0])
    views = views_of(["full", VIEWS["snapkv"], VIEWS["int4"]])
    picks = [draw(views, replace(batch, seed=seed)) for seed in range(300)]
    assert picks == [draw(views, replace(batch, seed=seed)) for seed in range(300)]
    assert draw(views_of(["full"]), batch) == {}
    for d, share in {0: 2 / 3, 1: 2 / 3, 2: 0, 3: 2 / 3, 4: 1 / 3}.items():
        assert sum(d in one for one in picks) / 300 == pytest.approx(share, abs=0.1)
    assert {one[1].start for one in picks if 1 in one} == {680}  # where its answer begins
    cuts = [one[0].start for one in picks if 0 in one]
    assert 100 <= min(cuts) < 120 and 365 < max(cuts) <= 380
    short = [one[4].view for one in picks if 4 in one]
    assert all(view is views[2] for view in short)  # 20% of its prompt is less than a window
    unlabelled = replace(batch, loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    assert not any(draw(views, replace(unlabelled, seed=seed)) for seed in range(20))


def test_documents_of_equal_views_are_read_together():
    views = views_of([VIEWS["snapkv"], "full", dict(VIEWS["snapkv"]), VIEWS["int4"]])
    assert views[0] is views[2] and views[1] is None and views[3] is not views[0]
    batch = row_of([90, 91, 92, 93], prompts=[70] * 4)
    spans = list(pairwise(batch.bounds))
    drawn = draw([views[0], views[2]], batch)
    assert [documents for _, documents in viewed_module._alike(drawn, spans)] == [[0, 1, 2, 3]]


def test_only_labels_that_a_view_changes_are_counted_and_none_is_told_once(caplog):
    """Of 40 tokens nothing is quantised, and of 300 the last 44 rows are read over a quantised block."""
    views_module._warn_of_no_effect.cache_clear()
    short, long = row_of([40, 40], prompts=[20, 20]), row_of([40, 300], prompts=[20, 250])
    for name, count in {"int4": 43, "int8": 43, "snapkv": 49}.items():
        options = views_of([VIEWS[name]])
        label_Y = long.loss_mask_T.nonzero()[:, 0]
        assert in_views(label_Y, long, draw(options, long)) == count, name
        assert not caplog.records
    for _ in range(2):
        drawn = draw(views_of([VIEWS["int4"]]), short)
        assert len(drawn) == 2 and in_views(short.loss_mask_T.nonzero()[:, 0], short, drawn) == 0
    assert len(caplog.records) == 1 and "method.views changes no document" in caplog.text


@pytest.mark.parametrize("method", SMALL)
@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], r"method.views=\[\]; allowed: a list of full, "),
        (["half"], r"method.views: entry=half; allowed: full, \{policy: NAME, budget: ROWS\}"),
        ([{"policy": "snapk", "budget": 0.2}], "unknown eviction policy 'snapk'; known: "),
        ([{"policy": "snapkv"}], r"entry=\{'policy': 'snapkv'\}; allowed: full, "),
        ([{"policy": "snapkv", "budget": 1.5}], r"budget=1.5; allowed: rows of 1 or more, or a share"),
        ([{"policy": "snapkv", "budget": 16}], "budget=16; allowed: 32 or more: snapkv keeps as many"),
        ([{"policy": {"name": "snapkv", "windw": 3}, "budget": 64}], "has no option 'windw'; known: window"),
        ([{"cache": "int3"}], "unknown cache 'int3'; known: int8, int4, elastic, rounded, engine"),
        ([{"cache": "int4", "budget": 0.2}], "method.views: entry=.*allowed: full, "),
    ],
)
def test_views_that_there_are_not_are_refused(method, views, message):
    with pytest.raises(ConfigError, match=message) as raised:
        get(method).config(views=views)
    assert "\n" not in str(raised.value)


def test_a_cache_that_the_target_cannot_have_is_refused_before_training():
    micro = random_target("llama_micro", seed=0)
    config = get("eagle3").config(layers=[0], views=["full", {"cache": "int4"}])
    with pytest.raises(ConfigError, match="heads of size 16; allowed: 64, 128"):
        get("eagle3").objective(get("eagle3").build(config, micro.info), micro, config)


@pytest.mark.parametrize("name", VIEWS)
def test_documents_that_are_read_together_are_read_as_if_alone(target, name):
    (view,) = views_of([VIEWS[name]])
    batch = row_of([420, 60, 300, 330, 510], prompts=[300, 55, 280, 299, 260])
    drawn = {d: one for d, one in draw([view], batch).items() if d != 1}  # one between them in full
    assert sorted(drawn) == [0, 2, 3, 4]
    pos_T, want = torch.cat([torch.arange(n) for n in (420, 60, 300, 330, 510)]), Want("none", (-1,), kv=(1,))
    together, seen = viewed(target, batch, pos_T, want, drawn)
    for d, one in drawn.items():
        a, b = batch.bounds[d : d + 2]
        alone, other = viewed(target, batch, pos_T, want, {d: one})
        torch.testing.assert_close(together.hidden[-1][a:b], alone.hidden[-1][a:b], rtol=1e-9, atol=1e-10)
        for got, expected in zip(together.kv[1], alone.kv[1], strict=True):
            torch.testing.assert_close(got[a:b], expected[a:b], rtol=1e-9, atol=1e-10)
        assert seen[d].stretches == other[d].stretches
        assert one.changed == next(stretch.start for stretch in seen[d].stretches if stretch.old)
        old = max(stretch.old for stretch in seen[d].stretches)
        assert len(seen[d].old[1]) == 2 and old
        for heads, single in zip(seen[d].old[1], other[d].old[1], strict=True):
            for got, expected in zip(heads, single, strict=True):
                torch.testing.assert_close(got[:old], expected[:old], rtol=1e-9, atol=1e-10)
    plain = target.packed(batch.ids_T, pos_T, batch.bounds, want)
    torch.testing.assert_close(together.hidden[-1][420:480], plain.hidden[-1][420:480], rtol=1e-9, atol=1e-10)
