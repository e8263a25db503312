"""What the suites of `benchmarks/` refuse in one line, before anything is measured or written."""

from __future__ import annotations

import pytest

from longtrain.errors import ConfigError

COUNT = "allowed: a whole number, 1 or more"
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
            for suite in ("kernels", "linears", "quantise")
        ),
        ("kernels", "suite.heads=[4]", r"suite.heads=\[4\]; allowed: \[query heads, KV heads\]"),
        ("kernels", "suite.head_dim=63", "suite.head_dim=63; allowed: 64, 128"),
        ("kernels", "suite.cells=[[int3,1,1k]]", "dense, int8 or int4"),
        ("kernels", "suite.cells=[[int4,1,128]]", "384 keys or more"),
        ("kernels", "suite.baselines=[magic]", r"suite.baselines=\['magic'\]; allowed: a list, each flash"),
        ("linears", "suite.weights=[int3]", r"suite.weights=\['int3'\]; allowed: a list, each dense, int4"),
        ("linears", "suite.shape=gpt9", "suite.shape=gpt9; known: llama_micro"),
        ("quantise", "suite.splits=[ceil]", r"suite.splits=\['ceil'\]; allowed: a list, each floor, rtn"),
        ("quantise", "suite.shape=qwen3_micro", "heads of size 32"),
        ("roofline", "suite.batches=[1,0]", r"suite.batches=\[1, 0\]; allowed: one or more"),
        ("quantspec suite.shape=gpt5", "", "suite.shape=gpt5; known: llama_micro"),
        (MICRO, "suite.systems=[{drafted:[1]}]", r"suite.systems: entry="),
        (MICRO, TWICE, "two systems named quantspec"),
        (MICRO, "suite.memory_gib=8", "suite.memory_gib=8 on a cpu"),
        (MICRO, "suite.fill=zeros", "suite.fill=zeros; allowed"),
        (
            "roofline",
            "suite.shape={hidden_size:5}",
            "suite.shape.num_hidden_layers is missing; allowed: a whole",
        ),
        ("roofline", "suite.shape=gpt9", "suite.shape=gpt9; known"),
        ("roofline", "suite.kv_bits=3", "suite.kv_bits=3; allowed: 16, 8, 4"),
    ],
)
def test_settings_are_refused(measured, tmp_path, suite, override, words):
    with pytest.raises(ConfigError, match=words) as refused:
        measured(*suite.split(), *override.split())
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.rglob("bench/*.json")]


def test_a_name_that_is_none_is_one_line(monkeypatch):
    from benchmarks.__main__ import main

    for words in ([], ["engine"]):
        monkeypatch.setattr("sys.argv", ["benchmarks", *words])
        with pytest.raises(SystemExit, match=r"no measurement is named .*; known: cycle_parts, draft_loss"):
            main()


def test_a_measurement_from_the_command_line(monkeypatch, tmp_path, capsys):
    from benchmarks.__main__ import main

    words = ["roofline", "lengths=[1k]", "suite.batches=[1]", f"home={tmp_path}", "name=one", "quiet=true"]
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    main()
    assert "llama31_8b on H200" in capsys.readouterr().out
    assert (tmp_path / "runs/one/bench/roofline.json").is_file()
