"""What the suites of `longtrain bench` refuse in one line, before anything is measured or written."""

from __future__ import annotations

import pytest

from longtrain.bench.suites import bench_of
from longtrain.errors import ConfigError
from longtrain.jobs import bench

EMPTY = r"suite.lengths=\[\]; allowed: one or more different token counts"
BATCHES = r"suite.batches=\[.*\]; allowed: one or more different whole numbers from 1"
COUNT = "allowed: a whole number, 1 or more"
SHAPE = "quantspec suite.shape=llama_micro"
MICRO = (
    "quantspec suite.shape={model_type:llama,vocab_size:61,hidden_size:64,intermediate_size:96,"
    "num_hidden_layers:1,num_attention_heads:2,num_key_value_heads:1,head_dim:64}"
)
TWICE = "suite.systems=[{method:quantspec},{method:quantspec}]"


@pytest.mark.parametrize(
    ("suite", "override", "words"),
    [
        *(
            (suite, "suite.repeats=0", f"suite.repeats=0; {COUNT}")
            for suite in ("kernels", "linears", "quantise", "engine")
        ),
        ("kernels", "suite.heads=[4]", r"suite.heads=\[4\]; allowed: \[query heads, KV heads\]"),
        ("kernels", "suite.heads=[4,0]", r"suite.heads=\[4, 0\]; allowed: "),
        ("kernels", "suite.heads=[4,3]", r"suite.heads=\[4, 3\]; allowed: "),
        ("kernels", "suite.head_dim=63", "suite.head_dim=63; allowed: 64, 128"),
        ("kernels", "suite.head_dim=80", "suite.head_dim=80; allowed: 64, 128"),
        ("kernels", "suite.mha_heads=0", f"suite.mha_heads=0; {COUNT}"),
        ("kernels", "suite.cells=[[int3,1,1k]]", "dense, int8 or int4"),
        ("kernels", "suite.cells=[[dense,1]]", r"allowed: a list, each \[cache, new rows, keys\]"),
        ("kernels", "suite.cells=[[int4,129,1k]]", "1 to 128 rows"),
        ("kernels", "suite.cells=[[int4,1,128]]", "384 keys or more"),
        ("kernels", "suite.cells=[] suite.mha_cells=[]", r"suite.cells=\[\]"),
        ("kernels", "suite.baselines=[magic]", r"suite.baselines=\['magic'\]; allowed: a list, each flash"),
        ("kernels", "suite.dtype=int8", "suite.dtype=int8"),
        ("linears", "suite.weights=[int3]", r"suite.weights=\['int3'\]; allowed: a list, each dense, int4"),
        ("linears", "suite.rows=[]", r"suite.rows=\[\]"),
        ("linears", "suite.shape=gpt9", "suite.shape=gpt9; known: llama_micro"),
        ("quantise", "suite.splits=[ceil]", r"suite.splits=\['ceil'\]; allowed: a list, each floor, rtn"),
        ("quantise", "suite.lengths=[]", r"suite.lengths=\[\]"),
        ("quantise", "suite.shape=qwen3_micro", "heads of size 32"),
        ("engine", "suite.max_new_tokens=1", "suite.max_new_tokens=1; allowed: a whole number, 2 or more"),
        ("engine", "suite.warmup=-1", "suite.warmup=-1; allowed: a whole number, 0 or more"),
        ("engine", "lengths=[]", EMPTY),
        ("engine", "suite.batches=[]", BATCHES),
        ("engine", "suite.batches=[1,0]", BATCHES),
        ("engine", "method=longspec", "method=longspec would decode with random weights; pass artifact=NAME"),
        (
            "engine",
            "method=pretrain suite.shape=llama_micro",
            "method=pretrain brings nothing to decode with",
        ),
        ("engine", "suite.shape=gpt9", "unknown shape 'gpt9'"),
        ("engine", "suite.baselines=[vllm]", r"suite.baselines=\['vllm'\]; allowed: a list, each hugging_"),
        ("engine", "suite.cycles=some", "suite.cycles=some; allowed: a whole number"),
        ("roofline", "lengths=[]", r"suite.lengths=\[\]; allowed: one or more different token counts"),
        ("roofline", "suite.batches=[]", r"suite.batches=\[\]; allowed: one or more different whole numbers"),
        ("roofline", "suite.batches=[1,0]", r"suite.batches=\[1, 0\]; allowed: one or more"),
        (SHAPE, "lengths=[]", EMPTY),
        (SHAPE, "suite.batches=[]", BATCHES),
        (SHAPE, "suite.drafted=[500]", r"suite.drafted=\[500\]; allowed: a list, each a whole number from 1"),
        ("quantspec suite.shape=gpt5", "", "suite.shape=gpt5; known: llama_micro"),
        (MICRO, "suite.systems=[{drafted:[1]}]", r"suite.systems: entry="),
        (MICRO, "suite.systems=[{method:{name:quantspec,bits:3}}]", "unknown key"),
        (MICRO, TWICE, "two systems named quantspec"),
        (MICRO, "suite.drafted=[0]", r"suite.drafted=\[0\]; allowed"),
        (MICRO, "suite.acceptance=2", "suite.acceptance=2; allowed: a number from 0 to 1"),
        (MICRO, "suite.memory_gib=8", "suite.memory_gib=8 on a cpu"),
        (MICRO, "suite.fill=zeros", "suite.fill=zeros; allowed"),
        (MICRO, "suite.warmup=1", "suite.warmup=1; allowed"),
        (MICRO, "suite.cycles=0", "suite.cycles=0; allowed"),
        ("roofline", "lengths=1k", "lengths=1k; allowed"),
        ("roofline", "suite.generated_tokens=0", "suite.generated_tokens=0; allowed: a whole"),
        (
            "roofline",
            "suite.shape={hidden_size:5}",
            "suite.shape.num_hidden_layers is missing; allowed: a whole",
        ),
        ("roofline", "suite.shape=3", "suite.shape=3; known: llama_micro"),
        ("roofline", "suite.shape=gpt9", "suite.shape=gpt9; known"),
        ("roofline", "suite.gpu=TPU", "suite.gpu=TPU; known: H100"),
        ("roofline", "suite.kv_bits=3", "suite.kv_bits=3; allowed: 16, 8, 4"),
    ],
)
def test_settings_are_refused(composed, tmp_path, suite, override, words):
    with pytest.raises(ConfigError, match=words) as refused:
        bench.run(composed("bench", *f"suite={suite}".split(), *override.split()))
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.rglob("bench/*.json")]


def test_a_suite_measures_the_target_that_is_named(composed):
    """`shape=auto` is the named target's; a suite of published shapes refuses any other."""
    cfg = composed("bench", "suite=draft_memory")
    assert bench_of("training").read(bench.plain(cfg.suite), bench.context_of(cfg)).shape["vocab_size"] == 256
    with pytest.raises(ConfigError, match=r"the named target has none of them; pass suite.cost.shape= with"):
        bench.run(composed("bench", "suite=eviction"))
    more = ("lengths=[512]", "suite.cost.draft_shape=llama32_1b")
    cfg = composed("bench", "suite=eviction", "target.path=null", "target.shape=llama31_8b", *more)
    suite = bench_of("eviction")
    settings = suite.read(bench._with_lengths(cfg, suite), bench.context_of(cfg))
    assert settings.shape == "llama31_8b" and settings.lengths == (512,)


def test_keys_that_bench_does_not_read_are_refused(run):
    said = run("bench", "suite=eviction", "suite.budgets=[8]")
    assert said.returncode == 1 and "suite.budgets is read by longtrain eval" in said.stderr
