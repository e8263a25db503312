"""lm-evaluation-harness as a suite: the figures of lm-eval's own model, and what our systems do to them."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longtrain.assets import asset_dir
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.harness.session import Session
from longtrain.evaluation.lm_harness import cut_answer
from longtrain.evaluation.suites import lm_eval as suite_module
from longtrain.systems import Builder

lm_eval = pytest.importorskip("lm_eval")
TASKS = ["lt_choice", "lt_answer", "lt_rolling"]


@pytest.fixture(scope="module")
def include(tmp_path_factory):
    """A folder with three tasks over six documents of a bundled novel."""
    folder = tmp_path_factory.mktemp("lm_tasks")
    (novel, *_) = sorted((asset_dir("bundled") / "text" / "heldout").glob("*.txt"))
    words, rng = novel.read_text(encoding="utf-8").split(), random.Random(0)
    rows = []
    for number in range(6):
        at = 4000 + 700 * number
        choices = [words[at + 120], *(rng.choice(words) for _ in range(3))]
        rng.shuffle(choices)
        rows.append(
            {
                "text": " ".join(words[at : at + 120]),
                "choices": choices,
                "label": choices.index(words[at + 120]),
                "name": rng.choice(["Ann", "Bell", "Cole"]),
                "number": str(rng.randrange(10**5, 10**6)),
            }
        )
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in (Path(__file__).parent / "lm_tasks").glob("*.yaml"):
        (folder / file.name).write_text(file.read_text().replace("DATA", str(data)))
    answer = (folder / "answer.yaml").read_text()
    broken = answer.replace("lt_answer", "lt_broken").replace(str(data), "/nowhere.jsonl")
    (folder / "broken.yaml").write_text(broken)
    (folder / "unsafe.yaml").write_text(answer.replace("lt_answer", "lt_unsafe") + "unsafe_code: true\n")
    return str(folder)


@pytest.fixture(scope="module")
def outcome(tiny, settings_of, include, tmp_path_factory):
    """`outcome(entries, tasks=..., **keys)`: what a session with these systems finds."""

    def run(*entries, tasks=TASKS, shapes=(), **keys):
        folder = tmp_path_factory.mktemp("run")
        settings = settings_of("lm_eval", tasks=list(tasks), include=include, **keys)
        suite = suite_module.build(settings, tiny, seed=0, sampling=Sampling())
        builder = Builder(tiny, [Budget(32)], list(shapes), {}.__getitem__)
        systems = builder.systems(list(entries))
        session = Session(
            target=tiny, suite=suite, systems=systems, sampling=Sampling(), folder=folder, home=folder,
            batch=2, resamples=50,
        )  # fmt: skip
        session.work()
        return session.finish(), session.records()

    return run


@pytest.fixture(scope="module")
def direct(include, tiny):
    """What lm-eval finds with its own Hugging Face model."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = tiny.info.name
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = HFLM(pretrained=stock.eval(), tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=2)
    return lm_eval.simple_evaluate(
        model=model,
        tasks=TASKS,
        task_manager=TaskManager(include_path=include, include_defaults=False),
        bootstrap_iters=0,
    )


def test_figures_are_those_of_lm_evals_own_model(outcome, direct) -> None:
    made, records = outcome()
    found = made.results["systems"][0]
    texts = [
        cut_answer(one.texts[0], ["\n", "."])
        for one in sorted(records, key=lambda one: one.example)
        if one.task == "lt_answer"
    ]
    samples = sorted(direct["samples"]["lt_answer"], key=lambda one: one["doc_id"])
    assert texts == [one["resps"][0][0] for one in samples] and len(set(texts)) > 1
    for name, metrics in direct["results"].items():
        mine = found["extra"]["lm_eval"]["results"][name]
        numbers = {key: value for key, value in metrics.items() if isinstance(value, float)}
        assert numbers and {key: mine[key] for key in numbers} == pytest.approx(numbers, rel=1e-5)
    by_task = {one["task"]: one for one in found["tasks"]}
    assert by_task["lt_choice"]["score"]["value"] == pytest.approx(
        100 * direct["results"]["lt_choice"]["acc,none"]
    )
    assert by_task["lt_answer"]["score"]["high"] is not None
    assert by_task["lt_rolling"]["score"]["value"] is None


@pytest.mark.slow
def test_systems_beside_the_full_cache(outcome) -> None:
    cache = {"method": {"name": "quantspec", "draft": False}}
    draft = {"method": {"name": "quantspec"}}
    made, _ = outcome("snapkv", cache, draft, tasks=["lt_choice", "lt_answer"], shapes=[TreeShape((1, 1, 1))])
    results = made.results
    systems = {one["name"]: one for one in results["systems"]}
    full, snap, quantised, drafted = systems.values()
    kept = [{task["task"]: task["kept_entries"] for task in one["tasks"]} for one in (full, snap)]
    assert (
        kept[1]["lt_choice"] < 80 < kept[0]["lt_choice"] and kept[1]["lt_answer"] < 80 < kept[0]["lt_answer"]
    )
    (exact,) = [task["exactness"] for task in drafted["tasks"] if task["task"] == "lt_answer"]
    assert exact["compared"] == 6 and exact["different"] == 0
    assert (
        drafted["extra"]["lm_eval"]["results"]["lt_answer"]
        == quantised["extra"]["lm_eval"]["results"]["lt_answer"]
    )
    assert all(one["versus_full"] is not None for one in (snap, quantised, drafted))


def test_a_run_goes_on_where_it_was_stopped(outcome, include, tiny, settings_of, tmp_path) -> None:
    settings = settings_of("lm_eval", tasks=["lt_answer"], include=include, limit=4)
    suite = suite_module.build(settings, tiny, seed=0, sampling=Sampling())
    systems = Builder(tiny, [], [], {}.__getitem__).systems([])

    def session() -> Session:
        return Session(tiny, suite, systems, Sampling(), tmp_path, tmp_path, batch=2, resamples=20)

    for shard in (0, 1):
        assert session().missing() == {"full": 4 - 2 * shard}
        session().work(shard=shard, shards=2)
    results = session().finish().results
    assert results["title"] == "Variant of lm-evaluation-harness"
    assert "the first 4 documents of each task" in results["notes"]
    assert results["systems"][0]["tasks"][0]["rows"] == 4


def test_solved_examples_and_chat_templates_change_the_prompts(include, tiny, settings_of) -> None:
    def prompts(**keys) -> list[str]:
        settings = settings_of("lm_eval", tasks=["lt_answer"], include=include, **keys)
        suite = suite_module.build(settings, tiny, seed=0, sampling=Sampling(1.0))
        (task,) = suite.tasks
        assert task.temperature == 0.0  # greedy, as lm-eval is
        return [one.fields["prompt"] for one in task.examples()]

    usual, none, chat = prompts(), prompts(fewshot=0), prompts(chat=True)
    assert all("Remember this" in one for one in usual)
    assert [one.count("Remember this") for one in (usual[0], none[0], chat[0])] == [3, 1, 3]
    assert chat[0].startswith("<|user|>") and usual == prompts()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"tasks": []}, ConfigError, r"suite.tasks=\[\]; allowed: different tasks of lm-eval"),
        ({"include": "/nowhere"}, ConfigError, "suite.include=/nowhere: no such folder"),
        ({"limit": 0}, ConfigError, "suite.limit=0; allowed: a whole number, 1 or more"),
        ({"few": 1}, ConfigError, "unknown key 'suite.few'"),
        ({"tasks": ["lt_broken"]}, DataError, "lm-eval cannot load lt_broken: .*nowhere.jsonl"),
        ({"tasks": ["lt_unsafe"]}, ConfigError, "lt_unsafe runs generated code, which is refused here"),
    ],
)
def test_settings_that_cannot_be(include, tiny, settings_of, changed, error, message) -> None:
    settings = {**settings_of("lm_eval", tasks=["lt_answer"], include=include), **changed}
    with pytest.raises(error, match=message):
        suite_module.build(settings, tiny, seed=0, sampling=Sampling())


def test_a_task_that_does_not_exist(include, monkeypatch) -> None:
    from longtrain.evaluation import lm_harness

    own = lm_harness.TaskManager
    monkeypatch.setattr(lm_harness, "TaskManager", lambda **keys: own(**{**keys, "include_defaults": False}))
    with pytest.raises(ConfigError, match="lm-eval has no task 'lt_answr'; like it: lt_answer"):
        lm_harness._manager(["lt_answr"], include)
    with pytest.raises(ConfigError, match="has no task 'x'; `lm-eval ls tasks` lists them"):
        lm_harness._manager(["x"], include)


def test_the_package_may_be_missing(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "longtrain.evaluation.lm_harness", raising=False)
    monkeypatch.delattr("longtrain.evaluation.lm_harness")
    monkeypatch.delitem(sys.modules, "longtrain.evaluation.suites.lm_eval")
    with pytest.raises(ConfigError, match=r"run: pip install 'longtrain\[lm-eval\]'"):
        importlib.import_module("longtrain.evaluation.suites.lm_eval")
