"""Families with windows and layers that differ: logits are transformers' own, in chunks, trees, batches."""

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longtrain.cache.base import Tree
from longtrain.decoding.engine import AUTO, Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import TargetMismatchError
from longtrain.methods.draft_folders import _architecture
from longtrain.targets.info import FAMILIES as INFO_FAMILIES
from longtrain.targets.info import TargetInfo
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest, TokenBatch
from longtrain.targets.stock import decode_stock
from tests import families
from tests.helpers import Recall, target_from_model, token_ids

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
"""Norms and rotary angles run in fp32 inside these models, whatever their dtype."""
WINDOW, PROMPT = 8, 50
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def shape_of(family, rng):
    """A small random config of a family, with windows of 8."""
    G = rng.choice((1, 2))
    shape = {
        **SHAPES["llama_micro"],
        "model_type": family,
        "num_hidden_layers": 3,
        "num_key_value_heads": G,
        "num_attention_heads": G * rng.choice((1, 2, 4)),
        "head_dim": rng.choice((8, 16)),
        "hidden_size": 48,
        "sliding_window": WINDOW,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    return {**shape, **FAMILIES[family](rng)}


def two_tables(rng):
    full = rng.choice(({"rope_type": "linear", "factor": 8.0}, {"rope_type": "default"}))
    return {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, **full},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        }
    }


FAMILIES = {
    "gemma3_text": lambda rng: {
        "layer_types": MIXED,
        "query_pre_attn_scalar": rng.choice((16, 24)),
        **two_tables(rng),
    },
    "mistral": lambda rng: {},
    "qwen2": lambda rng: {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": lambda rng: {"use_sliding_window": True, "layer_types": MIXED},
    "ministral": lambda rng: {"layer_types": MIXED},
    "ministral3": lambda rng: {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3}},
    "olmo3": lambda rng: {"layer_types": MIXED, **two_tables(rng)},
    "phi3": lambda rng: {"pad_token_id": 0},
    "exaone4": lambda rng: {"layer_types": MIXED},
    "smollm3": lambda rng: {
        "layer_types": MIXED,
        "use_sliding_window": True,
        "no_rope_layers": rng.choice(([1, 1, 0], [0, 1, 1])),
        "pad_token_id": 0,
    },
}


def made(family, seed=0):
    """A target with random weights that all matter, norms included."""
    target = random_target(shape_of(family, random.Random(seed)), seed=seed, dtype="float64")
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in target.model.named_parameters():
            if name.endswith("norm.weight"):
                param += 0.2 * torch.randn(param.shape, generator=rng, dtype=param.dtype)
    return target


def stock_of(target, attention):
    """The same weights in transformers' own model."""
    config = AutoConfig.for_model(**target.model.config.to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=target.dtype)
    model.load_state_dict(target.model.state_dict())
    return model.eval()


def rows_of(target, ids_BT, cache, first=0):
    """Logits of all tokens of a chunk after `first` committed ones."""
    pos_BT = torch.arange(first, first + ids_BT.shape[1]).expand_as(ids_BT)
    return target(TokenBatch(pos_BT, ids_BT), cache, outputs=OutputRequest("all")).logits_BTV


def in_chunks(target, ids_BT, size, cache=None):
    cache = cache or target.new_cache(len(ids_BT), 256, 64)
    found = []
    for first in range(0, ids_BT.shape[1], size):
        chunk_BT = ids_BT[:, first : first + size]
        found.append(rows_of(target, chunk_BT, cache, first))
        cache.commit(None, torch.full((len(ids_BT),), chunk_BT.shape[1]))
    return torch.cat(found, 1), cache


def ids(*shape, seed=1):
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.corners
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 20), marks=pytest.mark.slow)], ids=str)
def test_logits_are_those_of_transformers(family, attention, seeds):
    for seed in seeds:
        target, ids_BT = made(family, seed), ids(2, PROMPT, seed=seed)
        with torch.no_grad():
            theirs = stock_of(target, attention)(ids_BT).logits
            ours = rows_of(target, ids_BT, target.new_cache(2, PROMPT, 0))
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_windows_of_the_whole_context_are_none_and_change_nothing_else(family):
    """Exaone 4 still does not rotate in its full layers."""
    shape = {**shape_of(family, random.Random(1)), "sliding_window": 64, "max_position_embeddings": 64}
    config, ids_BT = AutoConfig.for_model(**shape), ids(1, PROMPT)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float64).eval()
    theirs = stock(ids_BT).logits
    target = target_from_model(stock)
    assert not any(target.info.windows)
    torch.testing.assert_close(rows_of(target, ids_BT, target.new_cache(1, PROMPT, 0)), theirs, **CLOSE)


@pytest.mark.parametrize(
    ("family", "values", "windows"),
    [
        ("llama", {}, (0, 0, 0)),
        ("llama", {"layer_types": MIXED}, (0, 0, 0)),
        ("seed_oss", {}, (0, 0, 0)),
        ("mistral", {"layer_types": MIXED}, (8, 8, 8)),
        ("qwen2", {"use_sliding_window": False}, (0, 0, 0)),
        ("qwen3_moe", {"layer_types": MIXED, "use_sliding_window": True, "num_experts": 8}, (8, 8, 8)),
    ],
)
@torch.no_grad()
def test_only_layers_whose_modules_read_the_window_have_one_fused_too(family, values, windows):
    """Configs name windows that transformers' modules of the family do not read."""
    shape = {**SHAPES["llama_micro"], "num_hidden_layers": 3, "model_type": family, "sliding_window": WINDOW}
    target, ids_BT = random_target({**shape, **values}, dtype="float32"), ids(2, PROMPT)
    theirs = stock_of(target, "eager")(ids_BT, use_cache=False).logits
    assert target.info.windows == windows
    for each in (target, target.fuse()):
        ours = rows_of(each, ids_BT, each.new_cache(2, PROMPT, 0))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window=0 "),
        ("phi3", {"sliding_window": -1, "pad_token_id": 0}, "sliding_window=-1 "),
        ("qwen2", {"use_sliding_window": False, "layer_types": MIXED}, "sliding_window=None "),
        (
            "smollm3",
            {"sliding_window": 8, "layer_types": MIXED, "pad_token_id": 0},
            "use_sliding_window=false",
        ),
    ],
)
def test_windows_without_a_size_and_windows_that_only_masks_have_are_refused(family, values, said):
    """SmolLM3's masks follow `layer_types` where its modules do not."""
    shape = {**SHAPES["llama_micro"], "num_hidden_layers": 3, "model_type": family}
    with pytest.raises(TargetMismatchError, match=f"type 'sliding_attention' and {said}"):
        random_target({**shape, **values})


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_chunks_packed_documents_and_one_token_at_a_time_equal_one_pass(family):
    target, ids_BT = made(family), ids(2, PROMPT)
    whole = rows_of(target, ids_BT, target.new_cache(2, PROMPT, 0))
    for size in (1, 7, 8, 9, PROMPT):
        torch.testing.assert_close(in_chunks(target, ids_BT, size)[0], whole, **CLOSE)
    packed = target.packed(
        torch.cat((ids_BT[0], ids_BT[1, :30])), torch.tensor([*range(50), *range(30)]), (0, 50, 80)
    )
    torch.testing.assert_close(target.head(packed.hidden[-1]), torch.cat((whole[0], whole[1, :30])), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family):
    target = made(family)
    (prompt,) = token_ids(PROMPT, least=2)
    ours = Engine(target).generate([prompt], max_new_tokens=30, ignore_eos=True).tokens
    assert ours == decode_stock(target, [prompt], max_new_tokens=30).tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_is_stored_and_compared(family):
    info = made(family).info
    shape = shape_of(family, random.Random(0))
    kinds = ["window", "full" if "layer_types" in shape else "window", "window"]
    if family == "qwen2":
        kinds[0] = "full"
    assert [info.layer(index).kind for index in range(3)] == kinds
    assert info.full_layers == tuple(index for index, kind in enumerate(kinds) if kind == "full")
    assert all(layer.kv_of == index for index, layer in enumerate(info.layers))
    assert TargetInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
    other = random_target({**shape_of(family, random.Random(0)), "sliding_window": 9}, dtype="float64").info
    with pytest.raises(TargetMismatchError, match=r"layers=layer \d: .*'window': 8.* 'window': 9"):
        TargetInfo.from_json({**info.to_json(), "weights_hash": ""}).check(other)


def visible_of(parents):
    """Ancestors, and itself, of each node of a tree given by its parents."""
    n = len(parents)
    seen = torch.eye(n, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


TREES = {
    "three levels": [-1, 0, 0, 1, 1, 2, 3, 5],
    "deeper than the window": [-1, *range(11), 0, 12, 13],
}


@pytest.mark.corners
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("length", [3, 6, 30])
@torch.no_grad()
def test_a_tree_row_equals_its_path_alone(family, tree, length):
    """With rows of a batch whose edges of the window lie at different places."""
    target, parents = made(family), TREES[tree]
    seen, n_B = visible_of(parents), torch.tensor([length, length + 5])
    ids_BT, node_BN = ids(2, length + 5), ids(2, len(parents), seed=2)
    cache = target.new_cache(2, 64, len(parents))
    target(TokenBatch(torch.arange(length + 5).expand(2, -1), ids_BT, n_B=n_B), cache)
    cache.commit(None, n_B)
    pos_BN = n_B[:, None] + seen.sum(-1) - 1
    mask = Tree(seen.expand(2, -1, -1))
    got = target(TokenBatch(pos_BN, node_BN, mask=mask), cache, outputs=OutputRequest("all")).logits_BTV
    for b in range(2):
        paths = [torch.cat((ids_BT[b, : n_B[b]], node_BN[b, row])) for row in seen]
        paths_NT = torch.nn.utils.rnn.pad_sequence(paths, batch_first=True)
        alone_NTV = rows_of(target, paths_NT, target.new_cache(len(paths), 64, 0))
        for node, path in enumerate(paths):
            torch.testing.assert_close(got[b, node], alone_NTV[node, len(path) - 1], **CLOSE)


@pytest.mark.parametrize("family", [*FAMILIES, *families.FAMILIES])
@torch.no_grad()
def test_after_random_accepted_and_rejected_rows_the_cache_is_a_fresh_one(family):
    """More tokens than a layer with a window has room for, so that entries are dropped on the way."""
    mixed = {"layer_types": MIXED, "sliding_window": WINDOW} if family == "gpt_oss" else {}
    other = family not in FAMILIES
    target = random_target(families.usual(family, **mixed), dtype="float64") if other else made(family)
    seen = visible_of(TREES["deeper than the window"])
    n_nodes, rng = len(seen), random.Random(0)
    texts, cache = [[], []], target.new_cache(2, 1200, n_nodes)
    paths = [row.nonzero()[:, 0].tolist() for row in seen]
    for step in range(40):
        node_BN = ids(2, n_nodes, seed=step)
        pos_BN = cache.len_B[:, None] + seen.sum(-1) - 1
        mask = Tree(seen.expand(2, -1, -1))
        target(TokenBatch(pos_BN, node_BN, mask=mask), cache, outputs=OutputRequest("none"))
        taken = [rng.choice(paths) for _ in range(2)]
        taken = [path[: rng.randint(0, len(path))] for path in taken]
        path_BP = torch.tensor([path + [0] * (n_nodes - len(path)) for path in taken])
        cache.commit(path_BP, torch.tensor([len(path) for path in taken]))
        for text, ids_N, path in zip(texts, node_BN.tolist(), taken, strict=True):
            text += [ids_N[node] for node in path]
    assert cache.len_B.tolist() == [len(text) for text in texts] and min(cache.len_B) > 75
    next_B1 = ids(2, 1, seed=999)
    got = target(TokenBatch(cache.len_B[:, None], next_B1), cache).logits_BTV
    for b, text in enumerate(texts):
        whole = torch.tensor([*text, int(next_B1[b])])[None]
        alone = rows_of(target, whole, target.new_cache(1, 1200, 0))[0, -1]
        torch.testing.assert_close(got[b, 0], alone, **CLOSE)


@pytest.mark.parametrize(
    ("family", "capture"),
    [
        pytest.param(family, capture, marks=[] if (number % 2 == 0) == capture else [pytest.mark.slow])
        for number, family in enumerate(FAMILIES)
        for capture in (False, True)
    ],
)
def test_speculation_across_the_edge_equals_plain_decoding(family, capture):
    """Drafts that are all rejected, all accepted, and right now and then."""
    target, prompts = made(family), token_ids(5, 7, 21, least=2)
    plain = Engine(target).generate(prompts, max_new_tokens=24, ignore_eos=True).tokens
    wrong = [[(token + 1) % 97 for token in text] for text in plain]
    tree, chain = TreeShape((2, 3, 3)), TreeShape((1,) * 9)
    cases = ((plain, tree, 1.5), (plain, chain, 1.5), (wrong, tree, 1.0), (plain, AUTO, 0))
    for texts, shape, least in cases:
        draft = Recall(texts)
        if shape is AUTO:
            draft.offers = ((1,), (2, 3, 3))
        engine = Engine(target, Parts(draft=draft, name="recall"), limits=Limits(), capture=capture)
        out = engine.generate(prompts, max_new_tokens=24, ignore_eos=True, shape=shape)
        assert out.tokens == plain and out.stats.tau >= least


def test_names_of_classes_are_those_of_transformers():
    known = random_target(SHAPES["llama_micro"]).info
    for family in INFO_FAMILIES:
        assert _architecture(replace(known, family=family)) == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
