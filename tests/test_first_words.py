"""Words that no job could use are told before torch is imported; a dry run refuses what a run would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longtrain import methods

STAGE = "sequence_tokens: 512, doc_tokens: 512"
TOLD = [
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
]
MISTAKES = [
    ["+recipe=quickstart", "optim.lr=-1"],
    ["plan", "method=longspec", "target=tiny", "gpu=FOO"],
    ["plan", "method=longspec", "target.shape=foo"],
    ["plan", "target=tiny", "contexts=[x]"],
    ["train", "method=longspec", "target=tiny", "data=text"],
    ["train", "method=longspec", "target=tiny", "data=text", "data.text=nothing"],
    ["inspect", "nothing"],
    ["demo", "prompt_file=nothing"],
    ["train", "method=longspec", "target=tiny", "data=text", "data.text=/dev/null"],
    ["generate", "target=tiny", "prompt_file=/dev/null"],
    ["+recipe=quickstart", "home=/proc/nothing"],
]
COMMANDS = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from longtrain import cli
for words, folder in json.loads(sys.argv[1]):
    os.chdir(folder)
    sys.argv = ["longtrain", *words]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            cli.main()
        except SystemExit:
            pass
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps([out.getvalue(), err.getvalue(), heavy]))
"""


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., list[tuple[list[str], str, str]]]:
    """`alone(*commands)`: words, stdout and stderr of each, none of which may import torch or write a file.

    One process runs them all, in which no test has imported anything.
    """

    def call(*commands: list[str]) -> list[tuple[list[str], str, str]]:
        folders = [tmp_path / str(number) for number in range(len(commands))]
        for folder in folders:
            folder.mkdir()
        given = json.dumps(list(zip(commands, map(str, folders), strict=True)))
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS, given], capture_output=True, text=True, env=env, check=True
        )
        found = []
        for words, folder, line in zip(commands, folders, done.stdout.splitlines(), strict=True):
            out, err, heavy = json.loads(line)
            assert heavy == [] and not list(folder.iterdir()), words
            found.append((words, out, err))
        return found

    return call


def test_a_wrong_word_is_told_without_torch(alone) -> None:
    """In a dry run as in a run."""
    told = [*TOLD, *(([*words, "dry_run=true"], says) for words, says in TOLD[::4])]
    for (_, says), (words, _, err) in zip(told, alone(*(words for words, _ in told)), strict=True):
        assert says in err and "Error" not in err, words


def test_a_mistake_is_told_first_in_one_line_and_without_torch(alone) -> None:
    for words, out, err in alone(*MISTAKES):
        assert not out and len(err.splitlines()) == 1 and err.startswith("longtrain: error: "), words


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
        "method longspec has no such format (of dspark, eagle3); vLLM can load its artifact as it is"
        in done.stderr
    )
    done = run("export", "target=tiny", "artifact=tiny_longspec", "format=flat", "dry_run=true")
    assert "method longspec has no such format" in done.stderr and "== export" not in done.stderr
    done = run("export", "+recipe=specontext_tiny", "format=flat", "dry_run=true")
    assert (
        "method specontext has no such format (of dspark, eagle3); it has sglang; leave format out"
        in done.stderr
    )


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
    spaced = run(*words, "optim.lr_multipliers={lm_head*: 0.5}").stderr
    assert "longtrain config bench suite=engine name=abc 'optim.lr_multipliers={lm_head*: 0.5}'" in spaced
