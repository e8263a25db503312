"""A made-up run: families at several budgets, a draft, a needle grid, outputs that try to break a page."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from longtrain.decoding.stats import Cycle
from longtrain.evaluation.analysis.numbers import output
from longtrain.evaluation.analysis.results import assemble
from longtrain.evaluation.analysis.statistics import Bootstrap
from longtrain.evaluation.records import Record, Turn
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Task
from longtrain.files import as_json, jsonl
from longtrain.systems import System

NASTY = (
    "</script><script>window.broken = 1</script>",
    '<img src=x onerror="window.broken = 2"> & &amp; &lt;b&gt;',
    "<!-- <script> --> ]]> ${1+1} {{x}} `'\" \\u003c \\",
    "line\u2028separator\u2029 nul\x00 bell\x07 bidi\u202eabc\u202c",
    "lone surrogate \ud800 and an emoji \U0001f9ea and combining e\u0301\u0301\u0301",
    "a" * 400,
    "\n\n\t  spaces   and\ttabs \n" + "- item\n" * 40,
    "",
)
QA = ("narrativeqa", "qasper", "gov_report", "lcc")
LEVEL = {"narrativeqa": 0.31, "qasper": 0.42, "gov_report": 0.33, "lcc": 0.61, "needle": 0.93}
LENGTHS, DEPTHS = (1024, 2048, 4096, 8192), (0, 25, 50, 75, 100)
BUDGETS = (64, 128, 256, 512)
STRENGTH = {"streaming_llm": 0.35, "snapkv": 0.75, "lookaheadkv_llama8b": 0.93}
TEXT = "the river moved slowly past the old mill while children counted boats and named them after stars"
WORDS = TEXT.split()


class MadeTask(Task):
    """Facets and references are fields of the row."""

    def facets(self, example: Example) -> dict:
        return dict(example.fields["facets"])

    def references(self, example: Example) -> list[str]:
        return list(example.fields["references"])


def make_suite(rows: int = 10, title: str = "Variant of LongBench") -> Suite:
    """Four question tasks and a needle grid."""
    tasks = []
    for name in QA:
        fields = [{"facets": {}, "references": ["a boat called Vega", f"answer {i}"]} for i in range(rows)]
        tasks.append(_task(name, fields))
    grid = [
        {"facets": {"length": length, "depth": depth}, "references": ["7306142"]}
        for length in LENGTHS
        for depth in DEPTHS
        for _ in range(2)
    ]
    tasks.append(_task("needle", grid))
    notes = (f"5 of 16 tasks; {rows} rows of each, fewer than published", "3 prompts cut to 7936 tokens")

    return Suite("longbench", tuple(tasks), title=title, notes=notes, cuts=True)


def _task(name: str, fields: list[dict]) -> Task:
    rows = tuple(Example(f"{name}-{i}", field) for i, field in enumerate(fields))
    return MadeTask(name, rows, "{facets}", 320, "f1", judge=lambda text, example: 0.0)


def make_systems() -> list[System]:
    """The full cache, three families at four budgets, a draft, and both together."""
    systems = [System("full", "full", "full")]
    for family in STRENGTH:
        kind = "artifact" if "_llama" in family else "policy"
        systems += [System(f"{family}@{b}", kind, family, str(b), facts={"budget": b}) for b in BUDGETS]
    draft = {"draft": "longspec_llama8b", "shape": [1, 1, 1, 1]}
    systems.append(
        System("longspec_llama8b", "artifact", "longspec_llama8b", facts=draft, lossless_of="full")
    )
    both = "lookaheadkv_llama8b+longspec_llama8b"
    systems += [
        System(f"{both}@{b}", "combined", both, str(b), facts=draft, lossless_of=f"lookaheadkv_llama8b@{b}")
        for b in (128, 512)
    ]
    return systems


def make_records(suite: Suite, systems: list[System], seed: int = 0) -> list[Record]:
    """Outcomes that get worse with smaller budgets; a draft gives its cache's texts."""
    records: dict[tuple[str, str, str], Record] = {}
    for system in systems:
        for task in suite.tasks:
            for place, example in enumerate(task.examples()):
                key = (system.name, task.name, example.id)
                kept = records.get((system.lossless_of or "", task.name, example.id))
                records[key] = _record(system, task, example, place, kept, seed)
    return list(records.values())


def _record(system, task, example, place, kept, seed) -> Record:
    rng = random.Random(f"{seed}/{task.name}/{example.id}")
    luck, facets = rng.random(), example.fields["facets"]
    length = facets.get("length", 3000 + 137 * place)
    budget = int(system.budget) if system.budget else None
    share = 1.0 if budget is None else STRENGTH.get(system.family.split("+")[0], 1) ** (60 / (budget + 10))
    if "depth" in facets and budget is not None:
        middle = 1 - abs(facets["depth"] - 50) / 50
        share *= 1 - 0.5 * (1 - share) * middle - 0.06 * LENGTHS.index(length)
    if task.name == "needle":
        score = float(luck < LEVEL["needle"] * share)
        text = "7306142" if score else f"{rng.randrange(10**7):07d}"
    else:
        score = round(min(1.0, max(0.0, LEVEL[task.name] * share * (0.4 + 1.2 * luck))), 4)
        own = random.Random(f"{seed}/{example.id}/{system.family}/{budget if share < 0.9 else ''}")
        cut = own.randrange(2, 12) if share < 0.9 else 14
        text = " ".join(WORDS[:cut] + own.sample(WORDS, 6 if share < 0.9 else 0)) + f" {place}."
        if place < len(NASTY):
            text = f"{NASTY[place]} {text}" if place < 5 else NASTY[place] or text
    ids = random.Random(repr(text))
    tokens = tuple(ids.randrange(32000) for _ in range(320 if task.name != "needle" else 8))
    rows = float(length if budget is None else min(length, budget))
    turn = Turn(text, tokens, "length", length, rows)
    score, turn = (score, turn) if kept is None else (kept.score, kept.turns[0])
    cycles = _cycles(rng, turn.output_tokens, length, system) if "longspec" in system.family else None
    return Record(
        system.name, task.name, example.id, dict(facets), length, "0" * 16, place % 9 == 4, (turn,), score,
        cycles=cycles,
    )  # fmt: skip


def _cycles(rng, tokens, length, system):
    rate, at, cycles = 0.86 - 0.02 * (length / 2048) - (0.03 if system.budget else 0), 1, []
    while at < tokens:
        hits = 0
        while hits < 4 and rng.random() < rate - 0.05 * hits - 0.0002 * at:
            hits += 1
        emitted = min(hits + 1, tokens - at)
        cycles.append(Cycle(at, 4, 4, hits, emitted))
        at += emitted
    return (tuple(cycles),)


def make_results(suite, systems, records, *, resamples: int = 200, settings=None) -> dict:
    """As the harness assembles them."""
    settings = settings or {
        "suite": "longbench",
        "tasks": [
            {"task": task.name, "template": "<b>{context}</b>", "stops": ["\n"]} for task in suite.tasks
        ],
        "max_prompt_tokens": {task.name: 7936 for task in suite.tasks},
        "tokenizer_sha256": "9f8e7d6c5b4a39281706f5e4d3c2b1a0",
        "chat_template_sha256": "0123456789abcdef0123456789abcdef",
        "decoding": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0},
    }
    return assemble(
        suite,
        systems,
        records,
        protocol=SimpleNamespace(hash="3f9a1c0be27d4456", settings=settings),
        target={"name": "llama31_8b", "weights_hash": "5d41402abc4b2a76", "dtype": "bfloat16"},
        draw=Bootstrap(resamples=resamples),
        baseline={"status": "equal", "recorded": 52.1, "measured": 52.5, "tolerance": 1.0, "source": "home"},
    )


def make_examples(suite, systems, records) -> list[dict]:
    """Lines of examples.jsonl; the prompts are made up, as no tokenizer is at hand."""
    lines = {}
    for record in records:
        key = (record.task, record.example)
        line = lines.setdefault(key, {
            "task": record.task, "example": record.example, "facets": record.facets,
            "prompt_tokens": record.prompt_tokens, "prompt_sha256": record.prompt_sha256, "cut": record.cut,
            "prompt_start": f"Read the following text. {' '.join(WORDS * 2)} <b>not bold</b>"[:300],
            "prompt_end": f"{' '.join(WORDS * 4)}\n\nQuestion: which boat? </textarea></script>\nAnswer:",
            "references": next(
                task.references(example)
                for task in suite.tasks if task.name == record.task
                for example in task.examples() if example.id == record.example
            ),
            "outputs": {},
        })  # fmt: skip
        line["outputs"][record.system] = output(record)
    return list(lines.values())


@pytest.fixture(scope="session")
def made() -> SimpleNamespace:
    """Suite, systems, records, results and examples of the made-up run."""
    suite, systems = make_suite(), make_systems()
    records = make_records(suite, systems)
    return SimpleNamespace(
        suite=suite,
        systems=systems,
        records=records,
        results=make_results(suite, systems, records),
        examples=make_examples(suite, systems, records),
    )


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """What makes results and examples of other records."""
    return SimpleNamespace(make_results=make_results, make_examples=make_examples)


@pytest.fixture
def write(made, tools, tmp_path):
    """Writes a run of the made-up suite: (name, change of a record, systems, hash) -> its folder."""

    def run(name, change=lambda record: record, systems=None, protocol="aa", settings=None, **target):
        systems = systems or made.systems[:3]
        names = {system.name for system in systems}
        records = [change(record) for record in made.records if record.system in names]
        results = tools.make_results(made.suite, systems, records, resamples=100)
        results["protocol"] = {
            "hash": protocol,
            "settings": settings or {"tasks": {"qasper": {"template": "x"}}},
        }
        results["target"].update(target)
        folder = tmp_path / name / "eval" / "longbench"
        folder.mkdir(parents=True)
        (folder / "results.json").write_bytes(as_json(results))
        lines = tools.make_examples(made.suite, systems, records)
        (folder / "examples.jsonl").write_bytes(jsonl(lines))
        return tmp_path / name

    return run
