"""What the site is made of: figures, settings, benchmark tables, messages and links (`docs/generate/`)."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import benchmarks
import figures
import knobs
import messages
import pytest
import repository

from longtrain import methods

ROOT = Path(__file__).parent.parent

PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_of_pages_stand_in_results(page: Path) -> None:
    depth = len(page.relative_to(ROOT / "docs").parts) - 1
    text = figures.fill(page.read_text(encoding="utf-8"), depth)
    assert ".json:" not in text


def test_a_figure_that_is_not_there_stops_the_build() -> None:
    file = "draft_memory.json"
    assert figures.shown(file, "rows[row_tokens=131072].step.peak_gib", ".1f") == "32.9"
    for place, said in (
        ("rows[row_tokens=5].step", "0 rows"),
        ("rows[0].nothing", "no key 'nothing'"),
        ("rows[0].step", "no number"),
    ):
        with pytest.raises(LookupError, match=said):
            figures.shown(file, place, ".1f")
    with pytest.raises(LookupError, match="is not in"):
        figures.fill("{{ none.json: a | .1f }}", 0)


def test_every_method_has_a_page_with_its_settings() -> None:
    for name in methods.names():
        text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        assert f"{{{{ settings: {name} }}}}" in text
        table = knobs.table(name)
        keys = re.findall(r"^\| `method\.(\w+)`\{\.key\} \|", table, re.M)
        assert set(keys) == {field.name for field in fields(methods.config_class(name))}
        for part in ("## In a picture", "## The equation", "## What to expect", "## When not to use it"):
            assert part in text


def test_settings_have_defaults_as_typed_and_whole_comments() -> None:
    table = knobs.table("longspec")
    assert "| `method.window`{.key} | `512` |" in table
    assert "4: a copy in 4 bits, read in a third of the time; 0: the copy for" in table
    assert "| `method.variant`{.key} | `shifted` |" in knobs.table("specontext")


def test_benchmark_pages_hold_every_file_and_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = benchmarks.pages()
    for file in repository.results():
        assert f"{{#{repository.anchor(file)}}}" in pages[f"benchmarks/{repository.group(file)}.md"]
    folder = tmp_path / "recipes" / "results"
    folder.mkdir(parents=True)
    rows = [
        {"name": "one", "tau": {"value": 2.5, "low": 2.25, "high": 2.75}, "batch": 1, "same": 7},
        {"name": "two", "tau": None, "batch": 2, "same": 7},
    ]
    (folder / "mine.json").write_text(json.dumps({"command": "longtrain bench", "rows": rows}))
    for module in (benchmarks, repository):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    page = benchmarks.pages()["benchmarks/mine.md"]
    assert "```sh\nlongtrain bench\n```" in page
    assert "| name | tau | batch |" in page and "| one | 2.5 [2.25, 2.75] | 1 |" in page
    assert "The same in every row: `same` 7." in page


def test_tables_have_as_many_cells_as_columns() -> None:
    for address, text in benchmarks.pages().items():
        wide = 0
        for line in text.splitlines():
            if not line.strip().startswith("|"):
                wide = 0
                continue
            cells = len(re.findall(r"(?<!\\)\|", line))
            wide = wide or cells
            assert cells == wide, (address, line)


def test_messages_that_people_meet_are_the_sources_own() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    known = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", text, re.M)
    assert len(known) >= 40 and len(known) == len(re.findall(r"^\| `", text, re.M))
    assert not [words for words in known if not any(words in one for one in messages.texts())]


def test_messages_have_what_is_wrong_and_what_to_do_apart() -> None:
    found = messages.raised()
    assert len(found) > 500 and sum(bool(one.remedy) for one in found) > 0.8 * len(found)
    one = next(one for one in found if "is a folder of checkpoints" in one.words)
    assert one.source == "longtrain/training/checkpoint.py" and one.remedy.startswith("pass resume=")
    assert {messages.area(one.source) for one in found} == {*messages.AREAS}
    cells = [re.split(r"(?<!\\)\|", row) for row in messages.table().splitlines() if row.startswith("| ")]
    assert {len(row) for row in cells} == {5}


def test_links_lead_to_pages_and_files_of_the_site() -> None:
    moved = repository.relink
    assert moved("[a](docs/cluster.md#start-it)", "index.md") == "[a](cluster.md#start-it)"
    assert moved("[a](../recipes/README.md)", "cluster.md") == "[a](recipes/index.md)"
    assert moved("[a](draft_memory.json)", "benchmarks/notes.md") == "[a](draft_memory.md#draft_memory)"
    assert moved("![a](report.png)", "benchmarks/notes.md") == "![a](../files/recipes/results/report.png)"
    assert moved("[a](recipes/slurm) [b](none.md)", "index.md") == "a [b](none.md)"
    assert moved("```\n[a](docs/cluster.md)\n```", "index.md") == "```\n[a](docs/cluster.md)\n```"
