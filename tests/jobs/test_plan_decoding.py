"""The plan of decoding: bytes that the caches really take, and the step model's own figures at 8B shape."""

import json

import pytest
import torch

from longtrain import methods
from longtrain.cache.entry_sets import ReadBudget
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.cache.named import cache_maker
from longtrain.costs import decoding
from longtrain.costs.footprint import fits
from longtrain.costs.hardware import GIB, GPUS
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.jobs import plan
from longtrain.jobs.planning.target_shape import target_shape
from longtrain.methods.longspec.config import Config as LongSpec
from longtrain.methods.longspec.config import source_layer
from longtrain.methods.quantspec.config import Config
from longtrain.methods.quantspec.spec import SPEC
from longtrain.targets.info import TargetInfo
from longtrain.targets.loading import random_target

INFO = TargetInfo(
    name="8b", family="llama", n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_size=4096,
    intermediate_size=14336, vocab_size=128256, max_positions=131072, rms_norm_eps=1e-5, rope={},
    qk_norm=False, attention_bias=False,
)  # fmt: skip
WEIGHTS = 16_060_522_496


def row_of(gpu, *, batch, context, draft=True, rate=0.9):
    """Plain decoding and QuantSpec's cycles of four drafted tokens."""
    served = decoding.Served(Sizes.of(INFO), GPUS[gpu], batch, 2, WEIGHTS)
    row = decoding.plain(served, context)
    return row | decoding.speculative(
        served, SPEC.cost.cycle(Config(draft=draft), served.size, (1,) * 4, 2), row, rate=rate
    )


@pytest.mark.parametrize(
    ("context", "plain_ms", "verify_ms", "draft_ms", "speedup", "own"),
    [
        (32768, 5.5, 5.1, 2.1, 1.67, 1.52),
        (65536, 6.7, 5.7, 2.5, 1.75, 1.5),
        (131072, 9.1, 7.1, 3.2, 1.87, 1.47),
    ],
)
def test_the_step_model_at_8b_shape(context, plain_ms, verify_ms, draft_ms, speedup, own):
    """Figures worked out by hand for one H200 at an acceptance of 0.9, to 2%."""
    row = row_of("H200", batch=1, context=context)
    outputs = {"plain_ms": plain_ms, "verify_ms": verify_ms, "draft_ms": draft_ms, "speedup": speedup}
    for key, value in (outputs | {"own_speedup": own}).items():
        assert row[key] == pytest.approx(value, rel=0.02), key
    assert row["least_ms"] < row["plain_ms"] and row["cycle_tokens"] == pytest.approx(4.0951)


def test_layers_with_a_window_store_and_read_its_entries():
    target = random_target("gemma3_micro", dtype="bfloat16")
    size = Sizes.of(target.info)
    served = decoding.Served(size, GPUS["H100"], 2, 2, WEIGHTS, target.info.windows)
    row, lengths = decoding.plain(served, 102), 2 * 3 * 8
    assert row["kv_gib"] * 2**30 == target.new_cache(2, 102, 0).bytes() - lengths
    assert served.seen(101) == (101 + 2 * 8) / 3 and served.seen(6) == 6
    every = decoding.Served(size, GPUS["H100"], 2, 2, WEIGHTS)
    fewer = decoding.plain(every, served.seen(102))
    assert row["plain_ms"] == fewer["plain_ms"] < decoding.plain(every, 102)["plain_ms"]


def test_the_bytes_are_those_of_the_cache():
    row = row_of("H100", batch=2, context=4096)
    cache = HierarchicalCache(
        n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, batch=2, max_tokens=4096, max_nodes=8,
        device="meta", dtype=torch.bfloat16,
    )  # fmt: skip
    assert row["own_gib"] == cache.bytes() / GIB and row["kv_gib"] == 1
    int4_gib = row["own_all_gib"] - row["own_gib"] - WEIGHTS / GIB
    assert int4_gib == pytest.approx(7.505e9 * (0.5 + 4 / 128) / GIB, rel=1e-3)
    alone = row_of("H100", batch=2, context=4096, draft=False)
    assert "speedup" not in alone and alone["own_all_gib"] < row["own_all_gib"] - 3


@pytest.mark.parametrize("recipe", ["quantspec_llama8b", "quantspec_llama2_7b_32k", "quantspec_lwm_7b_128k"])
def test_recipes_that_train_nothing_have_a_plan(composed, recipe, capsys):
    plan.run(composed("plan", f"+recipe={recipe}", "target.path=null"))
    said = capsys.readouterr().out
    drafted = 6 if "lwm" in recipe else 4
    assert f"QuantSpec: expected times; {drafted} drafted tokens a cycle" in said
    last = 32768 if "32k" in recipe else 131072
    assert said.count(f"| {last} |") == 2 and "PFLOP" not in said


def test_plain_decoding_needs_a_target_alone(composed, capsys):
    plan.run(composed("plan", "target=tiny", "target.path=tiny", "contexts=[1k,64k]", "batch=3", "gpu=A100"))
    said = capsys.readouterr().out
    assert "3 sequences on one A100" in said and "| 1024 |" in said and "| 65536 |" not in said
    assert "QuantSpec" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["select.dense_layers=[0]", "method=specontext"], "select.dense_layers=.* leave it out"),
        (["target.path=null", "target.shape=big"], "target.shape=big; allowed: one of llama_micro"),
        (
            ["target=gemma3_270m", "target.path=null", "target.shape.windows.layers=19"],
            "windows.layers=19; allowed: 1 to n_layers=18",
        ),
        (["gpu=B200"], "gpu=B200; known: H100"),
        (["contexts=[1m]"], "16384 positions"),
        (["batch=0"], "batch=0"),
        (["acceptance=1.5"], "acceptance=1.5"),
        (["method=quantspec", "target.path=null", "target.shape.head_dim=96"], "heads of size 96"),
    ],
)
def test_what_it_refuses(composed, words, message):
    base = ["target=llama31_8b"] if "target.path=null" in words else ["target=tiny", "target.path=tiny"]
    with pytest.raises(ConfigError, match=message):
        plan.run(composed("plan", *base, *words))


def test_an_elastic_cache_has_thresholds(composed, capsys):
    words = ["target=tiny", "target.path=tiny", "contexts=[1k]", "evict.budget_tokens=512"]
    plan.run(composed("plan", *words, "cache={name: elastic, memory_gib: 0.02}"))
    said = capsys.readouterr().out
    assert "Elastic cache of 1 sequence, 512 entries read a step, at most 0.02 GiB on the device" in said
    table = said[said.index("layers on the host") :].splitlines()[2:]
    rows = [[float(word) for word in line.split("|")[1:-1]] for line in table if line.startswith("|")]
    assert len(rows) > 1 and [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert all(row[3] <= 0.02 for row in rows)
    with pytest.raises(ConfigError, match=r"a cap of 0.0001 GiB"):
        plan.run(composed("plan", *words, "cache={name: elastic, memory_gib: 0.0001}"))
    with pytest.raises(ConfigError, match="cache=int8; plan knows: elastic"):
        plan.run(composed("plan", *words, "cache=int8"))
    plan.run(composed("plan", *words, "cache=elastic"))
    assert "all layers on the host from the start" in capsys.readouterr().out


@pytest.mark.parametrize("method", [["sparse", "rule=quest"], ["indexer"], ["longspec"]], ids=str)
def test_an_elastic_cache_is_not_planned_for_what_it_does_not_serve(composed, method):
    name, *options = method
    words = ["target=llama31_8b", "target.path=null", "cache=elastic", f"method={name}"]
    with pytest.raises(ConfigError, match=f"cache=elastic with method={name}: such steps cannot be"):
        plan.run(composed("plan", *words, *(f"method.{option}" for option in options)))


def test_a_cache_is_not_passed_over_where_training_is_planned(composed):
    with pytest.raises(ConfigError, match="cache=elastic: of a recipe that trains, training is planned"):
        plan.run(composed("plan", "+recipe=specontext_tiny", "cache=elastic"))


def test_windows_of_a_text_model_within_a_model_of_images_too(composed, capsys, tmp_path):
    text = {
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 512,
        "max_position_embeddings": 2048, "sliding_window": 32,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    cfg = composed("plan", "target=local", f"target.path={tmp_path}", "contexts=[1k]")
    plan.run(cfg)
    shown = capsys.readouterr().out
    gib = 2 * 2 * 16 * (6 * 159 + 2048) / 2**30  # K and V in bf16 of one head of 16
    assert (
        f"6 of 7 layers see the last 32 tokens; they store 159 entries, and all layers then {gib:.3g}"
        in shown
    )
    info, _ = target_shape(cfg.target)
    assert info.layer(0).rope != info.rope and source_layer(LongSpec(), info) == 5


@pytest.mark.parametrize("target", ["gpt_oss_20b", "shape"])
def test_a_published_shape_has_its_windows(composed, capsys, target):
    """By the target's own settings, and by the name of a shape: half of the layers store 255 entries."""
    named = ["target=llama31_8b", "target.path=null", "target.shape=gpt_oss_20b"]
    words = named if target == "shape" else [f"target={target}", "target.path=null"]
    plan.run(composed("plan", *words))
    gib = 2 * 2 * 8 * 64 * 12 * (255 + 131072) / 2**30
    said = f"12 of 24 layers see the last 128 tokens; they store 255 entries, and all layers then {gib:.3g}"
    assert said in capsys.readouterr().out


def test_a_target_without_a_path_is_called_as_its_shape(composed, capsys):
    plan.run(composed("plan", "target.path=null", "target.shape=llama31_8b"))
    assert "target    llama31_8b: 8.03 B weights" in capsys.readouterr().out


@pytest.mark.parametrize("every", [1, 4])
def test_the_cap_that_is_refused_is_the_caches_own(composed, every):
    """What the plan says is needed with all layers on the host is what the cache takes for its slots."""
    words = ["target=llama31_8b", "target.path=null", "evict.budget_tokens=512", f"select.every={every}"]
    with pytest.raises(ConfigError, match="with all 32 layers on the host") as caught:
        plan.run(composed("plan", *words, "cache={name: elastic, memory_gib: 0.01}"))
    planned = float(str(caught.value).split("on the host ")[1].split()[0])
    shape = {"n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128}
    make = cache_maker("elastic", {"memory_gib": 0.01}, **shape, device="cpu", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="entries that each step reads take") as caught:
        make(1, 1024, 1).reserve(ReadBudget(rows=512, every=every))
    assert planned == float(str(caught.value).split("take ")[1].split()[0])


def test_decoding_by_a_retrieval_head(composed, capsys):
    """A step reads the weights, the head and its keys of every token, and the chosen rows."""
    words = ["target=llama31_8b", "target.path=null", "contexts=[32k,128k]", "method=specontext"]
    plan.run(composed("plan", *words, "evict.budget_tokens=2048", "cache={name: elastic, memory_gib: 8}"))
    said = capsys.readouterr().out
    assert "SpeContext: expected times; 2048 entries read a step" in said and "draft" not in said
    cost = methods.get("specontext").cost.cycle(methods.get("specontext").config(), Sizes.of(INFO), (), 2)
    served = decoding.Served(Sizes.of(INFO), GPUS["H200"], 1, 2, WEIGHTS)
    rows = [decoding.plain(served, context) for context in (2048, 32768, 131072)]
    found = [row | decoding.speculative(served, cost.reading(2048), row, rate=0.9) for row in rows]
    keys = [2 * 1024 * row["context"] / (0.85 * 0.9 * 4.8e12) * 1e3 for row in rows]  # ms, 1024 numbers a key
    head = 2 * (3 * 4096 * 4096 + 8192 * (4096 + 1024)) / (0.87 * 0.9 * 4.8e12) * 1e3
    for row, ms in zip(found, keys, strict=True):
        assert row["score_ms"] == pytest.approx(ms + head, rel=0.01)
        assert row["own_ms"] == pytest.approx(rows[0]["plain_ms"] + row["score_ms"], rel=1e-6)
    for row in found:
        near, far = (decoding.offloaded(served, row, rows=2048, on_host=count) for count in (0, 32))
        assert near["moved_mb"] == 0 and near["host_ms"] == row["own_ms"]
        assert far["moved_mb"] == pytest.approx(0.35 * 2048 * 131072 / 1e6)
        assert far["host_ms"] == pytest.approx(row["own_ms"] + far["moved_ms"] / 32)
    table = said[said.index("Expected steps of it") :].splitlines()[3:5]
    away = [float(line.split("|")[2]) for line in table]
    assert away[0] == 0 < away[1] < 32  # 32K tokens take 4 GiB, 128K take 16


@pytest.mark.parametrize("name", ["specontext", "eagle3"])
def test_angles_of_a_module_can_be_typed(composed, name):
    """A mapping where the setting is null: the paper's YaRN."""
    cfg = composed("plan", f"method={name}", "method.rope={rope_type: yarn, factor: 64.0}")
    assert cfg.method.settings.rope == {"rope_type": "yarn", "factor": 64.0}


def test_a_head_that_cannot_be_built_is_refused(composed):
    with pytest.raises(TargetMismatchError, match=r"method.sets=99; target .* allows 1..2"):
        plan.run(composed("plan", "target=tiny", "contexts=[1k]", "method=specontext", "method.sets=99"))


def test_what_fits_is_said_in_a_sentence(composed, capsys):
    """The longest context that fits is the one at which the bytes need the whole of the device."""
    words = ["target=llama31_8b", "target.path=null", "contexts=[8k,128k]", "gpu=A6000"]
    plan.run(composed("plan", *words, "batch=2"))
    said = capsys.readouterr().out
    longest = int(said.partition("does up to ")[2].partition(":")[0])
    assert "Does not fit at 131072 tokens" in said and "| yes |" in said and "| no |" in said
    kept = [WEIGHTS + 2 * tokens * 131072 for tokens in (longest - 4, longest + 4)]  # norms are not counted
    assert [fits(one, GPUS["A6000"].memory_bytes) for one in kept] == [True, False]
    plan.run(composed("plan", *words))
    assert "Fits: there is room for" in capsys.readouterr().out
    plan.run(composed("plan", *words, "batch=1", "target.shape=llama33_70b"))
    assert "Does not fit: the weights alone take" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "says"), [("sparse", "method=sparse\n"), ("indexer", "artifact=NAME; for")]
)
def test_a_method_that_the_table_leaves_out_is_told(composed, capsys, method, says):
    plan.run(composed("plan", "target=tiny", "target.path=tiny", "contexts=[1k]", f"method={method}"))
    said = capsys.readouterr().out
    assert f"The table leaves method={method} out" in said and says in said


def test_a_choice_that_is_good_for_more_steps_is_scored_less_often(composed, capsys):
    scores = []
    for every in (1, 4):
        words = ["target=llama31_8b", "target.path=null", "contexts=[128k]", "method=specontext"]
        plan.run(composed("plan", *words, f"select.every={every}"))
        table = capsys.readouterr().out.partition("scores ms")[2].splitlines()[2]
        scores.append(float(table.split("|")[6]))
    assert scores[1] == pytest.approx(scores[0] / 4, rel=0.01)


def test_what_verification_reads_of_the_experts_is_told(composed, capsys):
    plan.run(composed("plan", "target=qwen3_30b_a3b", "target.path=null", "contexts=[1k]"))
    told = capsys.readouterr().out
    assert "30.5 B weights, 56.9 GiB" in told and "experts   128 in a layer, 8 a token" in told
    assert "1: 8 (x1), 2: 15.5 (x1.6), 4: 29.1 (x2.8), 8: 51.6 (x4.6)" in told
    plan.run(composed("plan", *["target=qwen3_8b", "method=eagle3", "contexts=[1k]"]))
    assert "experts" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("experts", "message"),
    [("{count: 8}", "target.shape.experts"), ("{count: 8, per_token: 0, size: 4}", "experts.per_token=0")],
)
def test_experts_of_a_shape_are_read_like_other_sizes(composed, experts, message):
    words = ["target=qwen3_8b", "target.path=null", "contexts=[1k]", f"+target.shape.experts={experts}"]
    with pytest.raises(ConfigError, match=message):
        plan.run(composed("plan", *words))
