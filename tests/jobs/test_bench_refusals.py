"""What the suites of `longtrain bench` refuse in one line, before anything is measured or written."""

from __future__ import annotations

import pytest

from longtrain.errors import ConfigError
from longtrain.jobs import bench

EMPTY = r"suite.lengths=\[\]; allowed: one or more different token counts"
BATCHES = r"suite.batches=\[.*\]; allowed: one or more different whole numbers from 1"
COUNT = "allowed: a whole number, 1 or more"
SHAPE = "quantspec suite.shape=llama_micro"


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
        ("engine", "suite.max_new_tokens=1", "suite.max_new_tokens=1; allowed: a whole number, 2 or more"),
        ("engine", "suite.warmup=-1", "suite.warmup=-1; allowed: a whole number, 0 or more"),
        ("engine", "lengths=[]", EMPTY),
        ("engine", "suite.batches=[]", BATCHES),
        ("engine", "suite.batches=[1,0]", BATCHES),
        ("roofline", "lengths=[]", r"suite.lengths=\[\]; allowed: one or more different token counts"),
        ("roofline", "suite.batches=[]", r"suite.batches=\[\]; allowed: one or more different whole numbers"),
        ("roofline", "suite.batches=[1,0]", r"suite.batches=\[1, 0\]; allowed: one or more"),
        (SHAPE, "lengths=[]", EMPTY),
        (SHAPE, "suite.batches=[]", BATCHES),
        (SHAPE, "suite.drafted=[500]", r"suite.drafted=\[500\]; allowed: a list, each a whole number from 1"),
        ("roofline", "lengths=1k", "lengths=1k; allowed"),
        (
            "roofline",
            "suite.generated_tokens=0",
            "suite.generated_tokens=0; allowed: a whole",
        ),
        ("roofline", "suite.shape={hidden_size:5}", "'hidden_size': 5} lacks num_hidden_layers, num_att"),
        ("roofline", "suite.shape=3", "suite.shape=3; known: llama_micro"),
    ],
)
def test_settings_are_refused(composed, tmp_path, suite, override, words):
    with pytest.raises(ConfigError, match=words) as refused:
        bench.run(composed("bench", *f"suite={suite}".split(), override))
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.rglob("bench/*.json")]
