import hashlib
import json
from dataclasses import replace

import pytest

from longtrain.config import RunConfig
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.analysis import compare
from longtrain.evaluation.analysis.statistics import Bootstrap
from longtrain.evaluation.reporting.comparisons import compare_table
from longtrain.evaluation.reporting.page import compare_page
from longtrain.files import jsonl, sealed


def compared(*folders):
    return compare.compare(*compare.load(folders), Bootstrap(resamples=300))


def lift(record):
    return replace(record, score=min(1.0, record.score + 0.05))


def test_differences_are_paired_and_over_common_examples(write):
    found = compared(write("old"), write("new", lift))
    assert [run["label"] for run in found["runs"]] == ["old", "new"]
    pair = next(one for one in found["pairs"] if one["name"] == "streaming_llm@64")
    assert pair["examples"] == 80
    assert 4 < pair["average"]["difference"]["value"] <= 5
    assert pair["average"]["larger_than_noise"]
    gap = pair["average"]["second"]["value"] - pair["average"]["first"]["value"]
    assert gap == pytest.approx(pair["average"]["difference"]["value"])
    assert pair["acceptance"] is None


def test_a_run_against_itself_shows_no_difference(write):
    folder = write("one")
    found = compared(folder, folder / "eval" / "longbench")
    for pair in found["pairs"]:
        assert pair["average"]["difference"]["value"] == 0
        assert not pair["average"]["larger_than_noise"]


def test_the_order_of_tasks_changes_no_difference(made, write):
    systems = [one for one in made.systems if one.name in ("full", "snapkv@64", "longspec_llama8b")]
    old, new = compare.load([write("old", systems=systems), write("new", lift, systems=systems)])
    other = replace(old, outputs=dict(reversed(old.outputs.items())))
    found, again = (compare.compare(one, new, Bootstrap(resamples=100))["pairs"] for one in (old, other))
    for one, two in zip(found, again, strict=True):
        assert one.pop("tasks") == two.pop("tasks")[::-1] and one == two


def test_acceptance_is_compared_where_drafts_ran(made, write):
    systems = [made.systems[0], next(s for s in made.systems if s.name == "longspec_llama8b")]

    def worse(record):
        if record.cycles is None:
            return record
        turns = tuple(tuple(replace(c, accepted=c.accepted // 2) for c in turn) for turn in record.cycles)
        return replace(record, cycles=turns)

    found = compared(write("old", systems=systems), write("new", worse, systems=systems))
    pair = next(one for one in found["pairs"] if one["name"] == "longspec_llama8b")
    assert pair["acceptance"]["difference"]["value"] < -0.5
    assert pair["acceptance"]["larger_than_noise"]
    assert not pair["average"]["larger_than_noise"]


def test_systems_of_other_names_are_paired_by_budget(made, write):
    by_name = {system.name: system for system in made.systems}
    old = [made.systems[0], by_name["snapkv@64"], by_name["snapkv@128"]]
    new = [made.systems[0], by_name["lookaheadkv_llama8b@64"], by_name["lookaheadkv_llama8b@256"]]
    found = compared(write("old", systems=old), write("new", systems=new))
    assert [pair["name"] for pair in found["pairs"]] == ["full", "snapkv@64 / lookaheadkv_llama8b@64"]
    assert found["pairs"][1]["average"]["difference"]["value"] > 0


def test_another_protocol_is_refused_naming_the_first_setting(write):
    old = write("old", settings={"chat_template": "abc", "tasks": {"qasper": {"template": "x"}}})
    new = write(
        "new", protocol="bb", settings={"chat_template": None, "tasks": {"qasper": {"template": "y"}}}
    )
    with pytest.raises(ConfigError, match='chat_template is "abc" in the first and null in the second'):
        compared(old, new)


def test_a_changed_prompt_deep_inside_is_named(write):
    old = write("old")
    new = write("new", protocol="bb", settings={"tasks": {"qasper": {"template": "y"}}})
    with pytest.raises(ConfigError, match=r'tasks\.qasper\.template is "x" in the first and "y"'):
        compared(old, new)


def test_tasks_of_one_run_alone_are_named_and_not_printed_as_json(write):
    tasks = {"qasper": {"template": "x"}, "lcc": {"template": "y"}, "trec": {"template": "z"}}
    old, new = write("old", settings={"tasks": tasks}), write("new", protocol="bb")
    with pytest.raises(
        ConfigError, match="cannot be compared: tasks lcc, trec only in old; run one"
    ) as error:
        compared(old, new)
    assert "{" not in str(error.value)
    with pytest.raises(ConfigError, match="task qasper only in new"):
        compared(write("third", protocol="cc", settings={"tasks": {}}), new)


@pytest.mark.parametrize(
    ("labels", "name"), [(("a", "b"), "a_vs_b"), (("x/eval/longbench", "../b c"), "x-eval-longbench_vs_b-c")]
)
def test_a_comparison_has_a_folder_of_its_own(labels, name):
    from longtrain.jobs.finished.compare import folder_name

    assert folder_name(*labels) == name


def test_other_prompts_under_one_protocol_are_refused(write):
    def another(record):
        return replace(record, prompt_sha256="1" * 16) if record.example == "qasper-3" else record

    with pytest.raises(ConfigError, match=f"task qasper, example qasper-3 \\({'0' * 16} and {'1' * 16}\\)"):
        compared(write("old"), write("new", another))


def test_other_weights_are_compared_and_said(write):
    found = compared(write("old"), write("new", weights_hash="other", dtype="float32"))
    assert "the targets' weights differ: llama31_8b and llama31_8b" in found["notes"]
    assert "the targets' precision differs: bfloat16 and float32" in found["notes"]


def test_nothing_to_pair_is_refused(made, write):
    by_name = {system.name: system for system in made.systems}
    old, new = write("old", systems=[by_name["snapkv@64"]]), write("new", systems=[by_name["snapkv@128"]])
    with pytest.raises(ConfigError, match="no system in common"):
        compared(old, new)


def test_folders_without_results_or_with_several(write, tmp_path):
    with pytest.raises(ConfigError, match=r"has no results\.json"):
        compare.load([tmp_path])
    folder = write("old")
    other = folder / "eval" / "ruler"
    other.mkdir()
    (other / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"results of several suites; name one of: .*longbench, .*ruler"):
        compare.load([folder])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.json", "{"),
        ("results.json", "{}"),
        ("examples.jsonl", '{"task": "qasper"}\n'),
        ("examples.jsonl", "["),
    ],
)
def test_a_damaged_file_is_named(write, name, content):
    folder = write("old")
    (folder / "eval" / "longbench" / name).write_text(content)
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        compare.load([folder])


def test_results_that_were_edited_are_refused(write):
    folder = write("old") / "eval" / "longbench"
    results = json.loads((folder / "results.json").read_text())
    lines = (folder / "examples.jsonl").read_bytes()
    results["examples_sha256"] = hashlib.sha256(lines).hexdigest()
    (folder / "results.json").write_bytes(sealed(results))
    assert compare.load([folder])[0].results["title"] == results["title"]
    (folder / "examples.jsonl").write_bytes(lines[: lines.rindex(b"\n", 0, -1) + 1])  # a line is gone
    with pytest.raises(DataError, match=r"examples\.jsonl cannot be read .*was changed"):
        compare.load([folder])
    (folder / "examples.jsonl").write_bytes(lines)
    text = (folder / "results.json").read_text()
    (folder / "results.json").write_text(text.replace('"value": 0.', '"value": 9.', 1))
    with pytest.raises(DataError, match=r"results\.json cannot be read .*was changed"):
        compare.load([folder])


@pytest.mark.parametrize("output", [{}, [], {"score": 1, "output_tokens": 2, "cycles": []}])
def test_an_output_of_another_form_is_no_bare_error(write, output):
    folder = write("old") / "eval" / "longbench"
    lines = [json.loads(line) for line in (folder / "examples.jsonl").read_text().splitlines()]
    lines[0]["outputs"] = dict.fromkeys(lines[0]["outputs"], output)
    (folder / "examples.jsonl").write_bytes(jsonl(lines))
    with pytest.raises(DataError, match=r"examples\.jsonl cannot be read"):
        compare.load([folder])


def test_the_report_marks_what_is_larger_than_noise(write):
    found = compared(write("old"), write("new", lift))
    text = compare_table(found)
    assert "old and new" in text.splitlines()[0]
    for pair in found["pairs"]:
        line = next(line for line in text.splitlines() if line.startswith(f"| {pair['name']} |"))
        assert ("**" in line) == pair["average"]["larger_than_noise"]
    html = compare_page(found).decode()
    assert "<h1>Variant of LongBench: old and new</h1>" in html
    assert html.count("<tr>") == 2 * (1 + len(found["pairs"]))


def test_the_job_writes_its_files_and_refuses_what_it_cannot_compare(write, tmp_path, monkeypatch):
    from longtrain.jobs import eval as job

    written = {}
    monkeypatch.setattr(job.provenance, "write", lambda folder, config, **facts: written.update(facts))
    runs = [str(write("old")), str(write("new", lift))]
    common = {"report": "html", "home": str(tmp_path), "run_dir": str(tmp_path / "both"), "seed": 0}
    cfg = RunConfig({**common, "compare": runs, "suite": {"name": "needle", "bootstrap": 50}})
    job.run(cfg)
    folder = tmp_path / "both" / "compare" / "old_vs_new"
    assert {path.name for path in folder.iterdir()} == {"compare.json", "compare.md", "compare.html"}
    assert json.loads((folder / "compare.json").read_text())["bootstrap"]["resamples"] == 50
    assert written == {"protocol": "aa"}
    kept = (folder / "compare.json").read_bytes()
    job.run(cfg.having(compare=runs[::-1]))
    assert (folder / "compare.json").read_bytes() == kept  # another comparison, another folder
    assert (tmp_path / "both" / "compare" / "new_vs_old" / "compare.md").is_file()
    with pytest.raises(ConfigError, match="names 1 of them; allowed: two"):
        job.run(cfg.having(compare=runs[:1]))
    with pytest.raises(ConfigError, match="there is no run nowhere"):
        job.run(cfg.having(compare=[str(tmp_path / "old"), "nowhere"]))
