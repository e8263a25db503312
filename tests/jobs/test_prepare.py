import json
import re
import sys

import pytest

from longtrain.config import RunConfig
from longtrain.data.packing.prepared import Prepared
from longtrain.errors import ConfigError, DataError
from longtrain.jobs import prepare
from longtrain.jobs.prepare import ensure_prepared

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}U:{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture
def target(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path / "target"
    folder.mkdir()
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return folder


@pytest.fixture
def cfg(tmp_path, target):
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    data = {
        "name": "mine",
        "conversations": str(chats),
        "sources": [{"conversations": str(chats), "kind": "chat"}],
        "long_documents": "error",
        "stages": [{"fraction": 1.0, "sequence_tokens": 32, "doc_tokens": 32}],
    }
    home = str(tmp_path / "home")
    return {
        "data": data,
        "target": {"path": str(target)},
        "home": home,
        "run_dir": f"{home}/runs/r",
        "seed": 0,
        "show": 0,
        "shards": 1,
        "shard": None,
    }


def run(cfg):
    prepare.run(RunConfig(cfg))


def test_prepares_and_says_what_it_did(cfg, tmp_path):
    run(cfg)
    (folder,) = [path for path in (tmp_path / "home" / "data").iterdir() if path.is_dir()]
    data = Prepared.open(folder, verify=True)
    facts = json.loads((tmp_path / "home/runs/r/prepare/provenance.json").read_text())
    assert (
        facts["data"]["sha256"] == data.manifest["sha256"]
        and (tmp_path / "home/runs/r/prepare/config.yaml").is_file()
    )
    assert data.labels.tolist() == [len("because")]


def test_training_finds_what_was_prepared(cfg, target):
    from transformers import AutoTokenizer

    run(cfg)
    asked, tokenizer = RunConfig(cfg), AutoTokenizer.from_pretrained(target)
    folder = ensure_prepared(asked.data, tokenizer, home=asked.home, context_tokens=64)
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert ensure_prepared(asked.data, tokenizer, home=asked.home, context_tokens=64) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == before


def test_show_prints_a_sample_with_its_labels_in_colour(cfg, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    cfg["show"] = 1
    run(cfg)
    out = capsys.readouterr().out
    green = [part.split("\x1b[0m")[0] for part in out.split("\x1b[1;32m")[1:]]
    assert "because" in "".join(green[1:]) and "why" not in "".join(green)


@pytest.mark.parametrize("colourless", [{}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}])
def test_show_marks_labels_where_there_are_no_colours(cfg, capsys, monkeypatch, colourless):
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in colourless.items():
        monkeypatch.setenv(name, value)
    cfg["show"] = 1
    run(cfg)
    legend, _, *rest = capsys.readouterr().out.splitlines()
    assert legend == "⟦label, to be predicted⟧, read only"
    said = "".join(rest).replace("\x1b[0m", "")
    labels = re.findall("⟦(.*?)⟧", said)
    assert "because" in "".join(labels) and "why" in said and "why" not in "".join(labels)
    assert said.count("⟦") == said.count("⟧") == len(labels) > 0


def test_a_conversation_longer_than_the_targets_context(cfg, tmp_path):
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 100}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(DataError, match="the limit is 64"):
        run(cfg)


def test_an_added_token_without_an_embedding_is_refused_before_training(cfg, target, tmp_path):
    """The tokenizer has one token more than the target has embeddings for, as after `add_tokens` alone."""
    from tokenizers import AddedToken, Tokenizer

    run(cfg)  # with a config that says no size
    inner = Tokenizer.from_file(str(target / "tokenizer.json"))
    inner.add_tokens([AddedToken("<new>")])
    assert inner.token_to_id("<new>") == 256
    inner.save(str(target / "tokenizer.json"))
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, "vocab_size": 256}))
    run(cfg)  # no text holds the token
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a <new> one"}, {"role": "assistant", "content": "because"}]
    chats.write_text(chats.read_text() + json.dumps({"messages": turns}) + "\n")
    with pytest.raises(DataError, match=r"chats\.jsonl:2 holds token id 256 \('<new>'\).* of 256 tokens"):
        run(cfg)
    cfg["data"]["on_error"] = "skip"
    run(cfg)
    (target / "config.json").write_text(json.dumps({**settings, "vocab_size": 257}))
    cfg["data"]["on_error"] = "error"
    run(cfg)
    (target / "config.json").write_text(json.dumps({**settings, "vocab_size": 256}))
    with pytest.raises(DataError, match="token id 256"):
        run(cfg)  # what was prepared for the larger target is not current for the smaller one


@pytest.mark.parametrize(
    "change,word", [({"data": None}, "data=NAME"), ({"target": {"path": None}}, "target=NAME")]
)
def test_what_is_missing_is_named(cfg, change, word):
    with pytest.raises(ConfigError, match=word):
        run(cfg | change)


def test_a_target_without_a_tokenizer_is_named(cfg, tmp_path):
    (tmp_path / "target" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"target\.path="):
        run(cfg)


def test_importing_the_job_does_not_import_transformers():
    import subprocess

    code = "import sys, longtrain.jobs.prepare; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
