"""The documents name what exists, and their commands compose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from longtrain import cli, methods
from longtrain.assets import asset_dir
from longtrain.jobs import JOBS, NAMED

ROOT = Path(__file__).parent.parent
DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "recipes/README.md",
    "data_prep/README.md",
    "SECURITY.md",
    *(file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "docs").rglob("*.md"))),
)


def commands(name: str) -> list[list[str]]:
    """Every longtrain command of a document: fenced, or between backticks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    fenced = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S))
    lines = [line.split("   #")[0] for line in fenced.splitlines()]
    lines += [part.replace("\n", " ") for part in re.findall(r"(?<!`)`([^`]*longtrain [^`]*)`(?!`)", text)]
    found = []
    for line in lines:
        for part in line.split("&&"):
            words = shlex.split(part)
            if words[:3] == ["python", "-m", "longtrain"]:
                words = words[2:]
            if words[:1] == ["longtrain"]:
                found.append(words[1:])
    return found


CASES = [(name, words) for name in DOCS for words in commands(name)]
ONCE = {" ".join(words): words for _, words in CASES}


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):
        yield


@pytest.mark.parametrize("words", ONCE.values(), ids=ONCE)
def test_commands_compose(words: list[str]) -> None:
    words = [word.replace("+recipe=NAME", "+recipe=quickstart") for word in words]
    job = words.pop(0) if words and words[0][0] not in "+-" else "train"
    if job == "config":  # of a job, train unless one is named
        job = words.pop(0) if words[0] in JOBS else "train"
    if job in ("recipes", "completion", "JOB") or words[:1] in (["--help"], ["--version"]):
        return
    assert job in JOBS
    if "-m" in words:  # a sweep: its first run
        words = [re.sub(r"=([^,\[\]]+),.*", r"=\1", word) for word in words]
    flags = {"-m", "--cfg", "job", "--resolve", "--help"}
    compose(
        job,
        overrides=cli._ordered([word for word in words if word not in flags], NAMED.get(job, ("", ""))[0]),
    )


def test_there_are_commands_to_check() -> None:
    assert len([case for case in CASES if case[0] == "README.md"]) >= 10


def test_readme_is_short_and_installs_in_one_line() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.sub(r"<!--.*?-->\n?", "", text, flags=re.S).splitlines()) <= 120  # without references
    assert "pip install -e . && longtrain demo\npython -m longtrain +recipe=quickstart\n" in text
    assert "pip install -e '.[test]' && pytest\n" in text


def test_readme_lists_every_method() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"| [`{name}`](docs/methods/{name}.md) |" in text for name in methods.names())


def test_recipe_index_is_complete() -> None:
    text = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| (?:.*\| )?`(\w+)` \|", text, re.M))
    named |= set(re.findall(r"`(longspec_\w+)`", text))
    assert named == set(cli.recipes())
    for name, about in cli.recipes().items():
        row = re.search(rf"^\| `{name}` \| (.*) \|$", text, re.M)
        assert row is None or row[1] == about


def test_manifest_index_is_complete() -> None:
    text = (ROOT / "data_prep" / "README.md").read_text(encoding="utf-8")
    for file in (ROOT / "data_prep").glob("*.yaml"):
        assert f"`{file.stem}`" in text


@pytest.mark.parametrize("name", [*DOCS, "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    file = ROOT / name
    for link in re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (file.parent / link).exists(), link


def test_slurm_scripts_hold_no_recipe_logic() -> None:
    for job in ("train", "prepare", "eval"):
        text = (ROOT / "recipes" / "slurm" / f"{job}.sbatch").read_text(encoding="utf-8")
        (words,) = re.findall(r'^.*"\+recipe=\$recipe".*$', text, re.M)
        assert '"${@:2}"' in words
