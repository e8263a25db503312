"""The eviction suite on a random target: prompts, marks, the oracle, and what the harness makes of them."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from longtrain.data.retrieval.questions import QUESTION_TASKS
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.eviction_prompts import Judged, Prompt, agreement, judge, make_prompts
from longtrain.evaluation.harness.session import Session
from longtrain.evaluation.harness.speed import SpeedTest
from longtrain.evaluation.reporting.pictures import pictures
from longtrain.evaluation.reporting.tables import table
from longtrain.evaluation.suites import eviction
from longtrain.methods import policies
from longtrain.methods.policies.oracle import QuestionOracle
from longtrain.systems import Builder
from longtrain.targets.bundle import LlamaShape, build_llama, save_bundle
from longtrain.targets.loading import load_target, random_target
from longtrain.targets.step import OutputRequest, TokenBatch
from longtrain.targets.tokenizer import train_tokenizer

TEXT = "The sea was calm that day. A boat came in\nand the men went home. " * 90
SMALL = {
    "name": "eviction",
    "lengths": [320, 384],
    "tasks": ["needles", "table", "quote"],
    "prompts": 6,
    "max_new_tokens": 5,
    "rank_prompts": 5,
    "rank_skip": 8,
}
ENTRIES = ["streaming_llm", {"name": "snapkv", "window": 8}]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("target")
    train_tokenizer([TEXT + "special magic numbers mentioned in the provided text"], folder / "tok", size=320)
    shape = LlamaShape(320, 32, 2, 4, 2, 16, 32, max_positions=512)
    save_bundle(build_llama(shape), folder / "tok", folder / "tiny")
    return load_target(folder / "tiny", dtype="float32")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "sea.txt").write_text(TEXT)
    return tmp_path / "sea.txt"


def prompts_of(target, lengths=(320, 384), **changes) -> dict[int, list[Prompt]]:
    keys = {"tasks": SMALL["tasks"], "count": 6, "margin": 5, "seed": 0, **changes}
    return make_prompts(target, {"sea": TEXT}, lengths=lengths, **keys)


@pytest.fixture
def session(target, text, tmp_path):
    """`session(entries, budgets, **settings)`: a session of the suite in a folder of its own."""

    def make(entries=ENTRIES, budgets=(16, 64), sampling=None, batch=4, **changes) -> Session:
        sampling = sampling or Sampling()
        settings = {**SMALL, "text": str(text), **changes}
        suite = eviction.build(settings, target, seed=0, sampling=sampling)
        held = [Budget(ratio=b) if isinstance(b, float) else Budget(b) for b in budgets]
        builder = Builder(target, held, [], lambda where: pytest.fail(where))
        systems = builder.systems(entries, roles=suite.needs, own=suite.own_systems)
        places = {"folder": tmp_path / "run", "home": tmp_path}
        return Session(
            target=target,
            suite=suite,
            systems=systems,
            sampling=sampling,
            batch=batch,
            resamples=50,
            **places,
        )

    return make


def finished(session: Session) -> dict:
    session.work()
    return session.finish().results


def tasks_of(results: dict, task: str = "320") -> dict[str, dict]:
    """System -> its entry of a task."""
    return {
        system["name"]: next(one for one in system["tasks"] if one["task"] == task)
        for system in results["systems"]
    }


def test_prompts_have_their_length_and_do_not_depend_on_their_number(target) -> None:
    some, more = (prompts_of(target, count=n) for n in (4, 7))
    assert all(len(prompt.whole) == length for length, made in more.items() for prompt in made)
    assert [prompt.task for prompt in more[320]] == ["needles", "table", "quote"] * 2 + ["needles"]
    assert some[384] == more[384][:4] and len(set(more[384])) == 7
    assert prompts_of(target, count=4, seed=1) != some


def test_what_is_continued_ends_at_the_same_places_at_every_length(target) -> None:
    made = prompts_of(target, tasks=("continue", "table"), count=5)
    short, long = ([p for p in made[n] if p.task == "continue"] for n in (320, 384))
    assert len(short) == 3
    assert all(a.context[1:] == b.context[-319:] for a, b in zip(short, long, strict=True))
    with pytest.raises(DataError, match=r"fewer suite\.prompts"):
        prompts_of(target, tasks=("continue",), count=500)


def test_marks_by_hand() -> None:
    needles = Prompt("needles", (1,), (2,), " 12, 345.", ("12", "345"))
    for right in (
        " 12, 345.<end>",
        " 345 and 12",
        " They are 12, 345. And more.",
        "12\n345",
        ":\n1. 345\n2) 12\n",
    ):
        assert judge(needles, right) == Judged(exact=True, share=1.0)
    for text, share in {
        "": 0.0,
        " 345.": 0.5,
        " 12, 3456.": 1.0,  # RULER looks for the string: 345 is in 3456
        " 12, 678.": 0.5,
        " 12, 345, 678.": 1.0,  # all are there, and one that was not asked for
        " 1. 12\n2. 345\n3. 67": 1.0,
        " 12, 345, 345.": 1.0,
        " 12, 12.": 0.5,
    }.items():
        assert judge(needles, text) == Judged(exact=False, share=share), text
    again = replace(needles, values=("12", "12"))
    assert judge(again, " 12, 12.").exact and judge(again, " 12.") == Judged(exact=False, share=1.0)
    assert judge(replace(needles, task="table", values=("7654321",)), " 7654321\n").exact
    assert not judge(replace(needles, task="table", values=("7654321",)), " 7654321 7654321\n").exact


def test_marks_of_variables_by_hand() -> None:
    chains = Prompt("chains", (1,), (2,), " ABCDE, FGHIJ.", ("ABCDE", "FGHIJ"))
    assert judge(chains, " FGHIJ, ABCDE. These 2 have the value 12345, I think.").exact
    assert judge(chains, " ABCDE.") == Judged(exact=False, share=0.5)
    assert judge(chains, " ABCDE, FGHIJ, KLMNO.") == Judged(exact=False, share=1.0)
    assert judge(chains, " ABCDEFGHIJ.") == judge(chains, " abcde, fghij.") == Judged(exact=False, share=1.0)
    assert judge(chains, " VAR ABCDE and VAR FGHIJ.").exact
    assert not judge(chains, " VAR ABCDE = 12345, VAR FGHIJ = VAR ABCDE, VAR KLMNO").exact


def test_marks_of_quotations_by_hand() -> None:
    said = "and the men went home; a boat came in at last"
    quote = Prompt("quote", (1,), (2,), said, (said,))
    for right in (said, said + " and left.", "and the men went\nhome; a boat came out again"):
        assert judge(quote, right) == Judged(exact=True, share=1.0)  # eight words are compared
    assert judge(quote, 'It goes on: "And the men  went home;\n\na boat came."') == Judged(
        exact=False, share=1.0
    )
    for wrong in ("and the men went home; a boat", "and the men stayed home; a boat came", ""):
        assert judge(quote, wrong) == Judged(exact=False, share=0.0)
    short = Prompt("quote", (1,), (2,), "went home. A", ("went home. A",))
    assert judge(short, "went home. A boat").exact and judge(short, "went out. A").share == 0.0


@pytest.mark.parametrize(
    ("passage", "right", "wrong"),
    [
        # answers of Qwen2.5-Coder-0.5B, which ends a quotation with its sentence
        ("clusion of my own room. I had just", "clusion of my own room.", "clusion of my house."),
        (" journey to Cumberland. I sat down and tried,", " journey to Cumberland.", " journey to London."),
        ("living for years in this house; and I", "living for years in this house; and I", "living there."),
        ('went away." He said that he would come', 'went away." He said that he would come', 'went away."'),
        ('said to me." Miss Fairlie came in', "said to me.", "said to me"),
    ],
)
def test_a_quotation_may_end_with_its_sentence(passage, right, wrong) -> None:
    quote = Prompt("quote", (1,), (2,), passage, (passage,))
    assert judge(quote, right) == Judged(exact=True, share=1.0)
    assert judge(quote, wrong) == Judged(exact=False, share=0.0)


def test_expected_answers_are_right(target) -> None:
    for prompt in chain.from_iterable(prompts_of(target, tasks=QUESTION_TASKS, count=40).values()):
        assert judge(prompt, prompt.answer) == Judged(exact=True, share=1.0)
        assert judge(prompt, target.tokenizer.decode(prompt.answer_ids)).exact
        assert not judge(prompt, "").exact


def test_agreement_by_hand() -> None:
    assert (agreement([1, 2, 3, 4], [1, 2, 9, 4]).share, agreement([1, 2], [1, 2]).exact) == (0.75, True)
    assert agreement([1, 2], [1, 2, 3, 4]).share == 0.5 and not agreement([1, 2], [1, 2, 3, 4]).exact


def test_end_to_end(target, session) -> None:
    made = session()
    results = finished(made)
    names = [system["name"] for system in results["systems"]]
    assert names == [
        "full",
        *(f"{one}@{b}" for one in ("oracle", "streaming_llm", "snapkv window=8") for b in (16, 64)),
    ]
    found = tasks_of(results)
    for name, one in found.items():
        own = one["metrics"]
        assert own["cache before"]["value"] == found["full"]["metrics"]["cache"]["value"]
        if name != "full":
            assert one["kept_entries"] == float(name.split("@")[1]) == pytest.approx(320 * one["kept_share"])
            assert own["cache"]["value"] < own["cache before"]["value"]
        assert ("Kendall τ" in own) == (name in ("oracle@16", "snapkv window=8@16"))
    ranks, other = (found[name]["metrics"] for name in ("oracle@16", "snapkv window=8@16"))
    assert ranks["Kendall τ"] == {"value": pytest.approx(1), "low": None, "high": None, "n": 5}
    # 320 tokens less the 8 of the windows: 512 are not to be had, and whoever recalls all says nothing
    assert [ranks.get(f"recall@{k}", {}).get("value") for k in (64, 128, 256, 512)] == [1.0, 1.0, 1.0, None]
    assert -1 < other["Kendall τ"]["value"] < 1 and other["recall@64"]["value"] < 1
    assert {cell["facets"]["task"] for cell in results["cells"]} == {"needles", "table", "quote"}
    timed = SpeedTest(target, made.systems, made.suite, Sampling(), prompts=1, tokens=1).rows()
    assert set(timed[0]["metrics"]) == {"full", "streaming_llm@16", "snapkv window=8@16"}
    text = table(results)
    for heading in (
        "string match by task",
        "Further metrics",
        "Kendall τ",
        "exact match",
        "string match by length",
    ):
        assert heading.lower() in text.lower()
    assert set(pictures(results)) == {"budget.png"}


def test_a_full_cache_that_answers_nothing_is_said_before_others_run(session, caplog) -> None:
    made = session(lengths=[320])
    made.work()
    (warning,) = [one.getMessage() for one in caplog.records if "below half" in one.getMessage()]
    assert warning.startswith(
        "the full cache scores below half in needles 0, quote 0, table 0 (average 0 of 1)"
    )
    assert warning in made.finish().results["notes"]


@pytest.mark.parametrize(("table_score", "said"), [(0.25, ["in table 0.25 (average 0.583 of 1)"]), (0.5, [])])
def test_what_is_answered_is_not_warned_about(session, monkeypatch, table_score, said) -> None:
    by_task = {"needles": 1.0, "table": table_score, "quote": 0.5}
    monkeypatch.setattr(
        eviction.EvictionTask, "score", lambda self, text, example: by_task[self.of(example).task]
    )
    notes = finished(session(lengths=[320], oracle=False))["notes"]
    assert [note.split("half ")[1].split(":")[0] for note in notes if "below half" in note] == said


def test_agreement_with_the_full_cache_is_never_below_half(session) -> None:
    notes = finished(session(["streaming_llm"], (16,), lengths=[320], tasks=["continue"]))["notes"]
    assert not any("below half" in note or "chat template" in note for note in notes)


def test_budgets_that_share_scores_give_what_each_gives_alone(target, session) -> None:
    entries = [
        *ENTRIES,
        {"name": "laq", "window": 8, "n_tokens": 4},
        {"name": "adakv", "options": {"window": 8}},
    ]
    made = session(entries, lengths=[320], rank_prompts=0)
    made.work()
    prompts = [prompt.whole for prompt in prompts_of(target)[320][:4]]
    for system in made.systems:
        if system.kind == "policy":
            alone = Engine(target, system.parts).generate(prompts, max_new_tokens=5).tokens
            assert [list(one.turns[0].tokens) for one in made.records([system])[:4]] == alone


def test_scores_are_computed_once_a_batch(session, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"snapkv": 0, "laq": 0}
    for name in calls:
        kind = policies.policy_class(name)

        def scores(self, run, *, _own=kind.scores, _name=name):
            calls[_name] += type(self).name == _name
            return _own(self, run)

        monkeypatch.setattr(kind, "scores", scores)
    entries = [ENTRIES[1], {"name": "laq", "window": 8, "n_tokens": 4}]
    session(entries, lengths=[320], oracle=False, batch=3).work()
    batches, budgets = 2, 2
    assert calls == {"snapkv": batches, "laq": batches * budgets}


def test_a_budget_above_the_prompt_is_the_full_cache(session) -> None:
    made = session(["snapkv", "random"], (1.0,), tasks=["continue"], prompts=4, rank_prompts=0)
    results = finished(made)
    assert results["scale"]["name"] == "agreement with the full cache"
    for one in tasks_of(results).values():
        assert one["score"]["value"] == one["metrics"]["exact match"]["value"] == one["kept_share"] == 1.0


def test_a_continuation_is_judged_by_the_full_cache(target, session) -> None:
    made = session(["streaming_llm"], (16,), tasks=["continue"], max_new_tokens=12, lengths=[320])
    made.work()
    prompts = [p.whole for p in prompts_of(target, (320,), tasks=("continue",), margin=12)[320]]
    plain = Engine(target).generate(prompts, max_new_tokens=12).tokens
    cut = Engine(target, Parts(evictor=policies.get("streaming_llm", budget=Budget(tokens=16))))
    tokens = cut.generate(prompts, max_new_tokens=12).tokens
    wanted = [agreement(a, b).share for a, b in zip(tokens, plain, strict=True)]
    assert [one.score for one in made.records([made.systems[-1]])] == wanted


def test_no_policy_sees_a_question_that_comes_after(target, session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    kind = policies.policy_class("snapkv")
    own = kind.scores
    monkeypatch.setattr(kind, "scores", lambda self, run: seen.append(run) or own(self, run))
    results = finished(session(question="after", lengths=[320]))
    assert [n for run in seen for n in run.lengths] == [len(p.context) for p in prompts_of(target)[320]]
    oracle = tasks_of(results)["oracle@16"]
    assert oracle["metrics"]["Kendall τ"]["value"] == pytest.approx(1) and oracle["kept_entries"] == 16
    assert any("those of the answer's tokens only" in note for note in results["notes"])


def test_the_told_oracle_reads_the_answers_rows_alone(target) -> None:
    """Against attention of one forward over context, question and answer, written out."""
    prompt = prompts_of(target)[320][0]
    seen = {}

    class Look:
        name = "look"

        def extra_tokens(self, longest):
            return len(prompt.question) + len(prompt.answer_ids)

        def hook(self, lengths):
            return None

        def select(self, run):
            oracle = QuestionOracle(Budget(tokens=16))
            oracle.tell([prompt.question], [prompt.answer_ids])
            seen["scores"] = oracle.scores(run)

    Engine(target, Parts(evictor=Look())).generate([list(prompt.context)], max_new_tokens=1)
    rows: dict[int, tuple] = {}
    ids = torch.tensor([*prompt.whole, *prompt.answer_ids])
    n, start = len(prompt.context), len(prompt.whole)
    target.forward(
        TokenBatch(torch.arange(len(ids))[None], ids[None]),
        target.new_cache(1, len(ids), 1),
        outputs=OutputRequest("none"),
        hook=lambda layer, q, k, v: rows.__setitem__(layer, (q[0], k[0])),
    )
    for layer, (q_HTD, k_GTD) in rows.items():
        k_HTD = k_GTD.repeat_interleave(2, 0)
        logits = q_HTD @ k_HTD.mT / q_HTD.shape[-1] ** 0.5
        p = logits.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf).softmax(-1)
        expected_GS = p[:, start:, :n].mean(1).view(2, 2, n).mean(1)
        torch.testing.assert_close(seen["scores"][layer, 0], expected_GS, atol=1e-6, rtol=1e-4)


def test_sampled_answers_are_compared_with_the_full_caches_own(session) -> None:
    heat = Sampling(temperature=1.0)
    keys = {"sampling": heat, "lengths": [320], "rank_prompts": 0, "tasks": ["continue"]}
    made = session(["streaming_llm"], **keys)
    found = tasks_of(finished(made))
    assert found["full"]["score"]["value"] == 1.0  # compared with the answer that the same draws give
    assert found["streaming_llm@16"]["score"]["value"] < 1 and found["streaming_llm@16"]["score"]["n"] == 6


def test_artifacts_are_compared_with_policies_at_the_same_budget() -> None:
    from longtrain.systems import System

    systems = [System("full", "full", "full")]
    systems += [
        System(f"{name}@{budget}", kind, name, budget)
        for name, kind in (("mine", "artifact"), ("snapkv", "policy"), ("oracle", "oracle"))
        for budget in ("8", "16")
    ]
    assert eviction.artifacts_and_policies(systems) == [("mine@8", "snapkv@8"), ("mine@16", "snapkv@16")]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"entries": ["snapkw"]}, "snapkw"),
        ({"entries": [{"name": "snapkv", "windows": 3}]}, "windows"),
        ({"entries": ["snapkv"]}, "16 entries and snapkv always keeps 32"),
        ({"entries": [{"name": "laq", "window": 17}]}, "16 entries and laq always keeps 17"),
        ({"entries": [{"name": "kvzip", "sinks": 17}]}, "16 entries and kvzip always keeps 17"),
        ({"entries": ["streaming_llm", "streaming_llm"]}, "two systems named streaming_llm@16"),
        ({"lengths": [508]}, "lengths of at most 507"),
        ({"lengths": [100]}, r"100 tokens is too short .*'needles'.* 2\d\d or more"),
        ({"tasks": ["needle"]}, r"suite.tasks=.*continue"),
        ({"tasks": ["table", "table"]}, r"suite.tasks=.*each once"),
        ({"prompts": 0}, "suite.prompts=0; allowed: .*1 or more"),
        ({"rank_skip": -1}, "suite.rank_skip=-1"),
        ({"lengths": []}, "suite.lengths="),
        ({"question": "before"}, "allowed: prompt, after"),
        ({"question": "after", "tasks": ["continue"]}, "suite.question=after"),
    ],
)
def test_what_cannot_be_run_is_said_before_it_is(session, keys, message) -> None:
    with pytest.raises(ConfigError, match=message):
        session(**keys)


def test_a_target_without_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        prompts_of(random_target("llama_micro"))
