import errno
import json
import os
import sys

import pytest
import yaml

from longtrain import provenance
from longtrain.errors import LongtrainError
from longtrain.files import write_text


def test_writes_config_and_facts_and_hides_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["longtrain", "logger.api_key=abc123", "data.sequence_tokens=2048"])
    config = {
        "name": "x",
        "logger": {"api_key": "abc123", "project": "p", "token": "t0k", "password": None},
        "decode": {"max_new_tokens": 128},
        "data": {"url": "https://me:pw@host/file", "sequence_tokens": 2048},
    }
    provenance.write(tmp_path / "out", config, data={"sha256": "ff", "hf_token": "hf_abcdefghijklmnopqrst"})
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert saved["logger"] == {"api_key": "***", "project": "p", "token": "***", "password": None}
    assert saved["decode"]["max_new_tokens"] == 128 and saved["data"]["sequence_tokens"] == 2048
    assert saved["data"]["url"] == "https://***@host/file"
    facts = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert facts["argv"] == ["longtrain", "logger.api_key=***", "data.sequence_tokens=2048"]
    assert facts["data"] == {"sha256": "ff", "hf_token": "***"}
    assert {"python", "torch", "lightning", "transformers", "longtrain"} <= set(facts["versions"])
    text = (tmp_path / "out" / "provenance.json").read_text() + (tmp_path / "out" / "config.yaml").read_text()
    assert "abc123" not in text and "hf_abcdef" not in text
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.yaml", "provenance.json"]


def test_absolute_paths_lose_their_folders():
    argv = ["/home/jo/bin/longtrain", "target.path=/home/jo/llama", "home=~/a/b", "files=[/a/x.txt,/a/y.txt]"]
    cut = ["longtrain", "target.path=llama", "home=b", "files=[x.txt,y.txt]"]
    kept = ["+recipe=x", "data.url=https://host/a/b", "target.path=org/name", "./a/b"]
    facts = {"argv": [*argv, "x=/a/b/", *kept], "step": 7, "git": None}
    assert provenance.without_folders(facts) == {"argv": [*cut, "x=b/", *kept], "step": 7, "git": None}


def test_checkout_names_its_commit():
    git = provenance.gather()["git"]
    assert git is None or (len(git["commit"]) == 40 and isinstance(git["dirty"], bool))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800 cannot be encoded")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_a_full_disk_is_one_clear_error_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text("old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LongtrainError, match=r"cannot write .*config.yaml: No space left.*free space"):
        write_text(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_a_configuration_is_read_as_it_was_written(tmp_path):
    config = {"name": "1e3", "prompt": "${not.there}", "lr": 1e-05, "rate": 0.5, "target": None, "on": "no"}
    provenance.write(tmp_path, config)
    assert provenance.read_config(tmp_path) == config


@pytest.mark.parametrize("content", ["[" * 50_000, "- a", "a: [", "\xff"])
def test_a_damaged_configuration_is_one_clear_error(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError) as error:
        provenance.read_config(tmp_path)
    assert "\n" not in str(error.value)
