"""What the suites of `longtrain bench` refuse in one line, before anything is measured or written."""

from __future__ import annotations

import pytest

from longtrain.bench import quantspec_text
from longtrain.cache.room import NoRoomError
from longtrain.errors import ConfigError
from longtrain.jobs import bench
from longtrain.targets.loading import load_target

EMPTY = r"lengths=\[\]; allowed: one or more prompt lengths"
BATCHES = r"suite.batches=\[.*\]; allowed: one or more batch sizes, each 1 or more"
COUNT = "allowed: 1 or more"


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
        ("engine", "suite.max_new_tokens=1", "suite.max_new_tokens=1; allowed: 2 or more"),
        ("engine", "suite.warmup=-1", "suite.warmup=-1; allowed: 0 or more"),
        ("engine", "lengths=[]", EMPTY),
        ("engine", "suite.batches=[]", BATCHES),
        ("engine", "suite.batches=[1,0]", BATCHES),
        ("roofline", "lengths=[]", r"suite.lengths=\[\]; allowed: one or more different token counts"),
        ("roofline", "suite.batches=[]", r"suite.batches=\[\]; allowed: one or more different whole numbers"),
        ("roofline", "suite.batches=[1,0]", r"suite.batches=\[1, 0\]; allowed: one or more"),
        *((suite, "lengths=[]", EMPTY) for suite in ("quantspec", "quantspec suite.shape=llama_micro")),
        ("quantspec suite.shape=llama_micro", "suite.batches=[]", BATCHES),
        ("quantspec", "suite.prompts=0", f"suite.prompts=0; {COUNT}"),
        ("quantspec", "suite.max_new_tokens=0", "suite.max_new_tokens=0; allowed: 2 or more"),
        (
            "quantspec",
            "suite.drafted=[500]",
            r"suite.drafted=\[500\]; allowed: one or more counts, each 1 to 127",
        ),
        (
            "quantspec",
            "lengths=[1k,1m]",
            r"lengths=\[1024, 1048576\] with suite.max_new_tokens=24 exceed the con",
        ),
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


def test_only_memory_running_out_is_a_result(target_folder):
    """Of a system that cannot be attached, or of one that cannot decode, the error ends the run."""
    target = load_target(target_folder)
    prompts, settings = {8: [[3, 4, 5, 6, 7, 8, 9, 10]]}, quantspec_text.Settings(4)

    def failing(error):
        def attach(_target):
            raise error

        return [quantspec_text.System("one", attach, (1,))]

    rows = quantspec_text.run(target, failing(NoRoomError("9 GiB and 1 GiB are free")), prompts, settings)
    assert [row.get("failed") for row in rows] == [None, "out of memory"]
    with pytest.raises(ConfigError, match="heads of size 96"):
        quantspec_text.run(target, failing(ConfigError("heads of size 96")), prompts, settings)
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        quantspec_text.run(target, [], prompts, quantspec_text.Settings(0))
