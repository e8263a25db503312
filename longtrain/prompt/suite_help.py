"""The suites section of `longtrain eval --help` and `longtrain bench --help`, read from the suites' files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from longtrain.assets import asset_dir

JOBS = ("eval", "bench")
"""Jobs that run suites."""
BASE = "common"
"""The name of a file that other suites build on; it is not a suite."""
EXAMPLES = {
    "eval": """\
  longtrain eval suite=smoke target=tiny method=quantspec
  longtrain eval suite=needle target=tiny suite.systems=[laq,snapkv] suite.budgets=[64,128] report=html
  longtrain eval suite=longbench target=llama31_8b artifact=[checkpoints/A,checkpoints/B] shards=8
  longtrain eval compare=[RUN_A,RUN_B]
""",
    "bench": """\
  longtrain bench suite=engine target=tiny
  longtrain bench suite=first_token suite.systems=[snapkv,laq] lengths=[8k,32k]
  longtrain bench suite=training method=longspec lengths=[8k]
""",
}

Blocks = dict[tuple[str, ...], list[str]]
"""(key) or ("suite", key) -> its lines of YAML."""


def suites_help(job: str, words: Sequence[str] = ()) -> str:
    """The suites of a job with their descriptions and examples, or the keys of the selected suite.

    Args:
        job: `eval` or `bench`; other jobs have no suites.
        words: words of the command line; `suite=NAME` selects a suite.

    Returns:
        Lines that end with a line break; empty for a job without suites.
    """
    if job not in JOBS:
        return ""
    chosen = [word.partition("=")[2] for word in words if re.match(r"\+{0,2}suite=", word)]
    if chosen and (asset_dir("conf") / "suite" / f"{chosen[-1]}.yaml").is_file():
        return f"== Keys of suite={chosen[-1]} ==\n{keys_of(chosen[-1])}"
    known = suites_of(job)
    wide = max(map(len, known))
    lines = "".join(f"  {name:<{wide}}  {about}\n" for name, about in known.items())
    return (
        f"== Suites (suite=NAME; their keys: longtrain {job} suite=NAME --help) ==\n{lines}\n"
        f"== Examples ==\n{EXAMPLES[job]}"
    )


def suites_of(job: str) -> dict[str, str]:
    """Name of each suite of a job -> its description: the comment at the beginning of its file.

    A comment with `bench:` marks a bench suite, one with `eval:` and `bench:` belongs to both, others to
    eval.
    """
    found = {}
    for file in sorted((asset_dir("conf") / "suite").glob("*.yaml")):
        about = file.read_text(encoding="utf-8").splitlines()[1].lstrip("# ")
        parts = re.split(r"\b(eval|bench): ", about)
        by_job = dict(zip(parts[1::2], parts[2::2], strict=True)) or {"eval": about}
        if job in by_job and file.stem != BASE:
            found[file.stem] = by_job[job].strip().removesuffix(".")
    return found


def keys_of(name: str) -> str:
    """The keys of a suite with their comments, including those of the files it builds on."""
    blocks = _blocks(name)
    top = "".join(line for key, lines in blocks.items() if len(key) == 1 for line in lines)
    own = "".join(line for key, lines in blocks.items() if len(key) == 2 for line in lines)
    return "".join(f"  {line}\n" for line in f"{top}suite:\n{own}".splitlines())


def _blocks(name: str) -> Blocks:
    text = (asset_dir("conf") / "suite" / f"{name}.yaml").read_text(encoding="utf-8")
    found: Blocks = {}
    if base := re.search(r"(?m)^defaults: \[(\w+)\]", text):
        found = _blocks(base[1])
    inside, lines = False, []
    for line in text.splitlines(keepends=True):
        if match := re.match(r"(  )?(\w+):", line):
            inside = bool(match[1]) or match[2] == "suite"
            key = ("suite", match[2]) if match[1] else (match[2],)
            lines = [line]
            if key not in (("suite",), ("defaults",)):
                found[key] = lines
        elif inside and line.strip() and not line.startswith("#"):
            lines.append(line)
    return found
