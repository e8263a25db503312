"""What the suites of `longtrain bench` refuse in one line, before anything is measured or written."""

from __future__ import annotations

import pytest

from longtrain.bench.suites import bench_of
from longtrain.errors import ConfigError
from longtrain.jobs import bench

EMPTY = r"suite.lengths=\[\]; allowed: one or more different token counts"
BATCHES = r"suite.batches=\[.*\]; allowed: one or more different whole numbers from 1"


@pytest.mark.parametrize(
    ("suite", "override", "words"),
    [
        ("engine", "suite.repeats=0", "suite.repeats=0; allowed: a whole number, 1 or more"),
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
        ("engine", "suite.repeats=some", "suite.repeats=some; allowed: a whole number"),
    ],
)
def test_settings_are_refused(composed, tmp_path, suite, override, words):
    with pytest.raises(ConfigError, match=words) as refused:
        bench.run(composed("bench", f"suite={suite}", *override.split()))
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.rglob("bench/*.json")]


def test_a_suite_measures_the_target_that_is_named(composed):
    """`shape=auto` is the named target's; a suite of published shapes refuses any other."""
    cfg = composed("bench", "suite=draft_memory")
    assert bench_of("training").read(cfg.suite.values, bench.context_of(cfg)).shape["vocab_size"] == 256
    with pytest.raises(ConfigError, match=r"the named target has none of them; pass suite.shape= with"):
        bench.run(composed("bench", "suite=first_token"))
    more = ("lengths=[512]", "suite.draft_shape=llama32_1b")
    cfg = composed("bench", "suite=first_token", "target.path=null", "target.shape=llama31_8b", *more)
    settings = bench_of("first_token").read(cfg.suite.values, bench.context_of(cfg))
    assert settings.shape == "llama31_8b" and settings.lengths == (512,)
