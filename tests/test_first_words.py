"""Words that no job could use are told before torch is imported; a dry run refuses what a run would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longtrain import methods

STAGE = "sequence_tokens: 512, doc_tokens: 512"
COMMAND = "import sys; sys.argv = ['longtrain', *WORDS]; from longtrain import cli\n"
COMMAND += "try: cli.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["export", "+recipe=quickstart", "format=vllm"],
            "format=vllm; allowed: flat, peft, sglang, speculators",
        ),
        (["train", "+recipe=quickstart", "data.stages=[]"], "data.stages is empty; give e.g. data.stages=[{"),
        (["train", "+recipe=quickstart", "data.stages=5"], "data.stages=5; allowed: a list of stages: [{"),
        (
            ["train", "+recipe=quickstart", f"data.stages=[{{fraction: 2.0, {STAGE}}}]"],
            "data.stages=fractions of 2 together; allowed: 1 at most",
        ),
        (["train", "+recipe=quickstart", "optim.lr=-1"], "optim.lr=-1; allowed: a number, above 0"),
        (["eval", "+recipe=quickstart", "report=pdf"], "report=pdf; allowed: html, or null"),
        (["generate", "target=tiny", "prompt="], "prompt is empty; pass a text"),
        (["generate", "target=llama31", "prompt=x"], "unknown target 'llama31'; did you mean llama31_8b?"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_wrong_word_is_told_without_torch(words: list[str], says: str, dry: bool, tmp_path: Path) -> None:
    words = [*words, "dry_run=true"] if dry else words
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    code = COMMAND.replace("WORDS", repr(words))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert says in done.stderr and "Error" not in done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    assert not list(tmp_path.iterdir())


def test_a_dry_run_asks_for_the_login_that_a_push_needs(run, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub as hub

    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "get_token", lambda: None)
    words = ["job=[train,export]", "+recipe=quickstart", "dry_run=true"]
    assert run(*words).returncode == 0
    done = run(*words, "push=ORG/NAME")
    assert done.returncode == 1 and "not logged in" in done.stderr and "hf auth login" in done.stderr
    assert "push=NAME is no repository name" in run(*words, "push=NAME").stderr


def test_a_format_of_another_method_names_what_serves_this_one(run) -> None:
    done = run("export", "+recipe=quickstart", "format=flat", "dry_run=true")
    assert (
        "method longspec has no such format (of eagle3); vLLM can load its artifact as it is" in done.stderr
    )
    done = run("export", "target=tiny", "artifact=tiny_longspec", "format=flat", "dry_run=true")
    assert "method longspec has no such format" in done.stderr and "== export" not in done.stderr
    done = run("export", "+recipe=specontext_tiny", "format=flat", "dry_run=true")
    assert "method specontext has no such format (of eagle3); it has sglang; leave format out" in done.stderr


def test_what_is_known_without_torch_is_what_the_methods_have() -> None:
    for name in methods.names():
        spec = methods.get(name)
        assert methods.formats().get(name, ()) == (spec.formats.names if spec.formats else ())
        assert methods.trains_target(name) == (spec.export is not None)


def test_a_job_says_what_was_typed_and_where_all_keys_are(run) -> None:
    words = ["bench", "suite=engine", "name=abc"]  # no target, which only the suite itself asks for
    loud = run(*words)
    assert "longtrain bench: abc" in loud.stderr
    assert "the defaults of this job with suite=engine name=abc" in loud.stderr
    assert "all keys: longtrain config bench suite=engine name=abc" in loud.stderr and not loud.stdout
    assert len(loud.stderr.splitlines()) < 8
    assert "all keys" not in run(*words, "quiet=true").stderr
