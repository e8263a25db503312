import json
import sys

import pytest
import yaml

from longtrain import provenance


def test_writes_config_and_facts_and_hides_secrets(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["longtrain", "logger.api_key=abc123", "data.row_tokens=2048"])
    config = {
        "name": "x",
        "logger": {"api_key": "abc123", "project": "p", "token": "t0k", "password": None},
        "decode": {"max_new_tokens": 128},
        "data": {"url": "https://me:pw@host/file", "row_tokens": 2048},
    }
    provenance.write(tmp_path / "out", config, data={"sha256": "ff", "hf_token": "hf_abcdefghijklmnopqrst"})
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert saved["logger"] == {"api_key": "***", "project": "p", "token": "***", "password": None}
    assert saved["decode"]["max_new_tokens"] == 128 and saved["data"]["row_tokens"] == 2048
    assert saved["data"]["url"] == "https://***@host/file"
    facts = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert facts["argv"] == ["longtrain", "logger.api_key=***", "data.row_tokens=2048"]
    assert facts["data"] == {"sha256": "ff", "hf_token": "***"}
    assert {"python", "torch", "lightning", "transformers", "longtrain"} <= set(facts["versions"])
    text = (tmp_path / "out" / "provenance.json").read_text() + (tmp_path / "out" / "config.yaml").read_text()
    assert "abc123" not in text and "hf_abcdef" not in text
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.yaml", "provenance.json"]


def test_checkout_names_its_commit():
    git = provenance.gather()["git"]
    assert git is None or (len(git["commit"]) == 40 and isinstance(git["dirty"], bool))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        provenance.replace_text(path, "\ud800 cannot be encoded")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
