"""`bench suite=quantspec_quality` from its configuration to what it writes."""

from __future__ import annotations

import json

import pytest
import torch
from byte_tokens import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain.bench import quantspec_quality
from longtrain.errors import ConfigError
from longtrain.jobs import bench

MICRO = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
}
SMALL = (
    "suite=quantspec_quality",
    "lengths=[300]",
    "suite.windows=2",
    "suite.scored_tokens=6",
    "suite.batch=2",
    "suite.prompts=1",
    "suite.max_new_tokens=8",
    "suite.drafted=[2]",
    "suite.row_counts=[2]",
    "suite.bootstrap=20",
)


@pytest.fixture(scope="session")
def micro(tmp_path_factory):
    """A target whose heads the hierarchical cache serves."""
    folder = tmp_path_factory.mktemp("heads_of_64")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MICRO)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return f"target.path={folder}"


def test_every_section_is_measured_and_written(composed, micro, tmp_path, capsys):
    bench.run(composed("bench", *SMALL, micro))
    folder = tmp_path / "runs" / "one" / "bench"
    rows = json.loads((folder / "quantspec_quality.json").read_text())["rows"]
    sections = [row["section"] for row in rows]
    assert sorted(set(sections)) == ["axes", "perplexity", "rows", "texts"]
    assert sections.count("perplexity") == 1 + 4 and sections.count("axes") == 1 + 8
    assert [row["cache"] for row in rows if row["section"] == "rows"] == ["quantised", "plain"]
    texts = [row for row in rows if row["section"] == "texts"]
    assert [row["system"] for row in texts] == ["quantspec floor", "quantspec rtn"]
    assert all(row["exactness"]["different"] == 0 and row["shape"] == [1, 1] for row in texts)
    said = capsys.readouterr().out
    assert all(title in said for title in quantspec_quality.TITLES.values()) and "wrote " in said
    assert (folder / "quantspec_quality.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "quantspec_quality.md").read_text() in said


def test_sections_come_alone(composed, micro, tmp_path):
    bench.run(composed("bench", *SMALL, micro, "suite.sections=[perplexity]", "suite.bits=[8]"))
    rows = json.loads((tmp_path / "runs" / "one" / "bench" / "quantspec_quality.json").read_text())["rows"]
    assert [row["reading"] for row in rows] == ["full precision", "INT8 floor", "INT8 rtn"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("suite.sections=[speed]", r"suite.sections=\['speed'\]; allowed: one or more of perplexity, axes"),
        ("suite.splits=[]", r"suite.splits=\[\]; allowed: one or more of floor, rtn"),
        ("suite.bits=[16]", r"suite.bits=\[16\]; allowed: one or more of 8, 4"),
        ("suite.windows=0", "suite.windows=0; allowed: 1 or more"),
        ("suite.drafted=[0]", r"suite.drafted=\[0\]; allowed: numbers from 1"),
        ("lengths=[]", r"lengths=\[\]; allowed: contexts of 2 tokens or more"),
        ("lengths=[1k]", "exceed the context of 1024"),
        ("method=longspec", "method=longspec for suite=quantspec_quality; allowed: quantspec"),
    ],
)
def test_what_is_refused(composed, micro, override, words):
    asked = [word for word in SMALL if word.split("=")[0] != override.split("=")[0]]
    only = [] if "sections" in override else ["suite.sections=[texts]"]
    with pytest.raises(ConfigError, match=words):
        bench.run(composed("bench", *asked, *only, micro, override))


def test_without_scores_there_is_no_picture():
    assert quantspec_quality.picture([{"section": "rows"}]) is None
    assert quantspec_quality.markdown([]) == ""
