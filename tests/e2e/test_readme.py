"""README's commands and its Python, run: with words behind them that make each small enough for a test."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

EVALUATED = ["lengths=[128]", "suite.prompts=1", "suite.max_new_tokens=4", "suite.bootstrap=10"]
TIMED = ["suite.speed_prompts=1"]
SHORT = ["decode.max_new_tokens=4"]
STEPS = ["trainer.max_steps=2", "data.val_sequences=1"]
HERE = [
    *("target=tiny", "data=excerpt", "trainer=cpu", "method.offset_max_tokens=4096"),
    "data.stages=[{fraction: 1.0, sequence_tokens: 256, doc_tokens: 256}]",
    "data.val_sequences=1",
]
"""In the place of a target, data and GPUs that are not on this machine."""
SMALLER = {
    "+recipe=quickstart": [*STEPS, *EVALUATED, *TIMED, *SHORT],
    "generate +recipe=quickstart": SHORT,
    "demo": [],
    "prepare +recipe=longspec_llama8b_anchor": HERE,
    "train +recipe=longspec_llama8b_anchor": [*HERE, "trainer.max_steps=1", "trainer.sequences_per_step=1"],
    "export +recipe=longspec_llama8b_anchor": HERE,
    "eval +recipe=longspec_llama8b_anchor": [*HERE, *EVALUATED, *SHORT, "suite.speed_prompts=0"],
    "plan +recipe=longspec_qwen3_8b_long": [],
    "generate target=tiny": SHORT,
    "bench suite=draft_memory": ["lengths=[64]", "suite.warmup=0", "suite.repeats=1"],
}
"""First two words of a command -> words behind it."""


def commands(text: str) -> list[list[str]]:
    """The words of every longtrain command in README's fenced lines, in their order."""
    fenced = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S))
    parts = [part.split("   #")[0] for line in fenced.splitlines() for part in line.split("&&")]
    words = [shlex.split(part, comments=True) for part in parts]
    return [one[1:] for one in words if one[:1] == ["longtrain"]] + [
        one[3:] for one in words if one[:3] == ["python", "-m", "longtrain"]
    ]


def test_readmes_commands_run(
    run: Callable[..., CompletedProcess[str]], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("It was a dark night, and the captain " * 20, encoding="utf-8")
    found = commands((root / "README.md").read_text(encoding="utf-8"))
    assert len(found) == 11
    found = [words for words in found if words[0] != "serve"]  # it runs until it is stopped
    found.sort(key=lambda words: words != ["+recipe=quickstart"])  # the others use what it leaves
    for words in found:
        done = run(*words, *SMALLER[" ".join(words[:2])])
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-2000:]}"
        assert done.stdout.strip() or words[0] in ("prepare", "train", "export")
    artifacts = {file.parent.name for file in (tmp_path / "checkpoints").glob("*/longtrain.json")}
    assert artifacts == {"quickstart", "longspec_llama8b_anchor"}


def test_readmes_python_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), re.S)
    exec(code, {})
    text, tau = capsys.readouterr().out.strip().rsplit(" ", 1)
    assert len(text) > 50 and float(tau) > 1.5
