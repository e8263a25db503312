"""The eviction suite on a random target: prompts, marks, shared scores, and going on after a kill."""

import json
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
from longtrain.evaluation import eviction
from longtrain.evaluation.eviction_policies import contenders
from longtrain.evaluation.eviction_protocol import FULL_CACHE, Protocol
from longtrain.evaluation.eviction_ranks import ToldOracle
from longtrain.evaluation.eviction_report import accuracy_picture, overhead_picture, table
from longtrain.evaluation.eviction_runs import measure
from longtrain.evaluation.eviction_scores import Figures
from longtrain.evaluation.eviction_tasks import Judged, Prompt, agreement, judge, make_prompts
from longtrain.evaluation.pieces import Pieces
from longtrain.files import as_json
from longtrain.methods import policies
from longtrain.targets.bundle import LlamaShape, build_llama, save_bundle
from longtrain.targets.loading import load_target, random_target
from longtrain.targets.step import Rows, Want
from longtrain.targets.tokenizer import train_tokenizer

TEXT = "The sea was calm that day. A boat came in\nand the men went home. " * 90
SMALL = Protocol(
    (320, 384),
    (Budget(tokens=16), Budget(tokens=64)),
    prompts=6,
    tasks=("needles", "table", "quote"),
    max_new_tokens=5,
    batch=4,
    rank_prompts=5,
    rank_skip=8,
    time_prompts=1,
)
ENTRIES = ["streaming_llm", {"name": "snapkv", "window": 8}]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("target")
    train_tokenizer([TEXT + "special magic numbers mentioned in the provided text"], folder / "tok", size=320)
    shape = LlamaShape(320, 32, 2, 4, 2, 16, 32, max_positions=512)
    save_bundle(build_llama(shape), folder / "tok", folder / "tiny")
    return load_target(folder / "tiny", dtype="float32")


def prompts_of(target, protocol: Protocol) -> dict[int, list[Prompt]]:
    return make_prompts(
        target,
        {"sea": TEXT},
        tasks=protocol.tasks,
        lengths=protocol.lengths,
        count=protocol.prompts,
        margin=protocol.max_new_tokens,
        seed=protocol.seed,
    )


def asked(target, entries, protocol: Protocol):
    return contenders(target, entries, protocol, load=lambda where: pytest.fail(where))


def go(target, folder, protocol=SMALL, entries=ENTRIES, advance=lambda what, done: None):
    """Pieces and scores of a run."""
    found = asked(target, entries, protocol)
    prompts = prompts_of(target, protocol)
    pieces = eviction.run(target, found, prompts, protocol=protocol, pieces=Pieces(folder), advance=advance)
    return pieces, Figures(found, protocol, pieces, resamples=50).scores()


def test_prompts_have_their_length_and_do_not_depend_on_their_number(target) -> None:
    some, more = (prompts_of(target, replace(SMALL, prompts=n)) for n in (4, 7))
    assert all(len(prompt.whole) == length for length, made in more.items() for prompt in made)
    assert [prompt.task for prompt in more[320]] == ["needles", "table", "quote"] * 2 + ["needles"]
    assert some[384] == more[384][:4] and len(set(more[384])) == 7
    assert prompts_of(target, replace(SMALL, prompts=4, seed=1)) != some


def test_what_is_continued_ends_at_the_same_places_at_every_length(target) -> None:
    made = prompts_of(target, replace(SMALL, tasks=("continue", "table"), prompts=5))
    short, long = ([p for p in made[n] if p.task == "continue"] for n in (320, 384))
    assert len(short) == 3
    assert all(a.context[1:] == b.context[-319:] for a, b in zip(short, long, strict=True))
    with pytest.raises(DataError, match=r"fewer suite\.prompts"):
        prompts_of(target, replace(SMALL, tasks=("continue",), prompts=500))


def test_marks_by_hand() -> None:
    needles = Prompt("needles", (1,), (2,), " 12, 345.", ("12", "345"))
    for right in (" 12, 345.<end>", " 345 and 12", " They are 12, 345. And more.", "12\n345"):
        assert judge(needles, right) == Judged(exact=True, share=1.0)
    for text, share in {
        "": 0.0,
        " 345.": 0.5,
        " 12, 3456.": 0.5,  # 3456 is no 345
        " 12345.": 0.0,
        " 12, 345, 678.": 1.0,  # all are there, and one that was not asked for
        " 12, 345, 345.": 1.0,
        " 12, 12.": 0.5,
    }.items():
        assert judge(needles, text) == Judged(exact=False, share=share), text
    again = replace(needles, values=("12", "12"))
    assert judge(again, " 12, 12.").exact and judge(again, " 12.") == Judged(exact=False, share=0.5)
    assert judge(replace(needles, task="table", values=("7654321",)), " 7654321\n").exact
    assert not judge(replace(needles, task="table", values=("7654321",)), " 7654321 7654321\n").exact


def test_marks_of_variables_by_hand() -> None:
    chains = Prompt("chains", (1,), (2,), " ABCDE, FGHIJ.", ("ABCDE", "FGHIJ"))
    assert judge(chains, " FGHIJ, ABCDE. These 2 have the value 12345, I think.").exact
    assert judge(chains, " ABCDE.") == Judged(exact=False, share=0.5)
    assert judge(chains, " ABCDE, FGHIJ, KLMNO.") == Judged(exact=False, share=1.0)
    assert judge(chains, " ABCDEFGHIJ.") == judge(chains, " abcde, fghij.") == Judged(exact=False, share=0.0)


def test_marks_of_quotations_by_hand() -> None:
    said = "and the men went home. A boat came in at last"
    quote = Prompt("quote", (1,), (2,), said, (said,))
    for right in (said, said + " and left.", "and the men went\nhome. A boat came out again"):
        assert judge(quote, right) == Judged(exact=True, share=1.0)  # eight words are compared
    assert judge(quote, "and the men went home. A boat") == Judged(exact=False, share=7 / 8)
    assert judge(quote, "and the men stayed home. A boat came") == Judged(exact=False, share=3 / 8)
    assert judge(quote, "so " + said) == judge(quote, "") == Judged(exact=False, share=0.0)
    short = Prompt("quote", (1,), (2,), "went home. A", ("went home. A",))
    assert judge(short, "went home. A boat").exact and judge(short, "went out. A").share == 1 / 3


def test_expected_answers_are_right(target) -> None:
    protocol = replace(SMALL, tasks=QUESTION_TASKS, prompts=40)
    for prompt in chain.from_iterable(prompts_of(target, protocol).values()):
        assert judge(prompt, prompt.answer) == Judged(exact=True, share=1.0)
        assert judge(prompt, target.tokenizer.decode(prompt.answer_ids)).exact
        assert not judge(prompt, "").exact


def test_agreement_by_hand() -> None:
    assert (agreement([1, 2, 3, 4], [1, 2, 9, 4]).share, agreement([1, 2], [1, 2]).exact) == (0.75, True)
    assert agreement([1, 2], [1, 2, 3, 4]).share == 0.5 and not agreement([1, 2], [1, 2, 3, 4]).exact


def test_end_to_end(target, tmp_path: Path) -> None:
    counted: list[int] = []
    pieces, scores = go(target, tmp_path, advance=lambda what, done: counted.append(done))
    assert sum(counted) == 2 * 6 * (1 + 3 * 2)
    names = [policy["name"] for policy in scores["policies"]]
    assert names == ["full", "oracle", "streaming_llm", "snapkv window=8"]
    for policy in scores["policies"][1:]:
        for cell, whole in zip(policy["lengths"], scores["policies"][0]["lengths"], strict=True):
            assert [row["kept_rows"] for row in cell["budgets"]] == [16, 64]
            assert all(row["bytes_after"] < row["bytes_before"] for row in cell["budgets"])
            assert cell["budgets"][0]["kept_share"] == 16 / cell["length"]
            full = whole["budgets"][0]
            assert cell["budgets"][0]["bytes_before"] == full["bytes_before"] == full["bytes_after"]
    ranks = {policy["name"]: policy["lengths"][0]["ranks"] for policy in scores["policies"]}
    assert ranks["full"] is None and ranks["streaming_llm"] is None
    assert ranks["oracle"]["prompts"] == 5 and ranks["oracle"]["tau"] == pytest.approx(1)
    # 320 tokens less the 8 of the windows: 512 are not to be had, and whoever recalls all says nothing
    assert ranks["oracle"]["recall"] == {"64": 1.0, "128": 1.0, "256": 1.0, "512": None}
    assert -1 < ranks["snapkv window=8"]["tau"] < 1 and ranks["snapkv window=8"]["recall"]["64"] < 1
    timings = Figures(asked(target, ENTRIES, SMALL), SMALL, pieces).timings()
    assert {row["name"] for row in timings["rows"]} == {"streaming_llm", "snapkv window=8"}
    assert all(row["first_token_s"] > 0 and len(row["times"]["full_s"]) == 1 for row in timings["rows"])
    report = table(scores, timings)
    for heading in ("Exact match", "Share of the full", "by task", "Ranking", "Memory", "first token"):
        assert heading in report
    for picture in (accuracy_picture(scores), overhead_picture(scores, timings)):
        assert picture.startswith(b"\x89PNG")


def test_budgets_that_share_scores_give_what_each_gives_alone(target, tmp_path: Path) -> None:
    entries = [
        *ENTRIES,
        {"name": "laq", "window": 8, "n_tokens": 4},
        {"name": "adakv", "options": {"window": 8}},
    ]
    seen = measured(target, entries)
    prompts = prompts_of(target, SMALL)[320]
    for at, budget in enumerate(SMALL.budgets):
        for one in asked(target, entries, SMALL)[1:]:
            engine = Engine(target, Parts(evictor=one.make(budget)))
            alone = engine.generate([p.whole for p in prompts[:4]], max_new_tokens=5).texts
            assert [w["answer"] for w in seen[one.name]["budgets"][at]["wrong"]] == alone[:3]


def measured(target, entries) -> dict[str, dict]:
    """Pieces at 320 tokens; a random target is wrong everywhere, so wrong answers are the first ones."""
    prompts = prompts_of(target, SMALL)[320]
    keys = {"protocol": SMALL, "ranks": None, "gold": [], "advance": lambda what, done: None}
    return {one.name: measure(target, one, prompts, **keys) for one in asked(target, entries, SMALL)}


def test_scores_are_computed_once_a_batch(target, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"snapkv": 0, "laq": 0}
    for name in calls:
        kind = policies.policy_class(name)

        def scores(self, run, *, _own=kind.scores, _name=name):
            calls[_name] += type(self).name == _name
            return _own(self, run)

        monkeypatch.setattr(kind, "scores", scores)
    protocol = replace(SMALL, time_prompts=0)
    prompts = prompts_of(target, protocol)[320]
    for one in asked(target, [ENTRIES[1], {"name": "laq", "window": 8, "n_tokens": 4}], protocol)[2:]:
        measure(target, one, prompts, protocol=protocol, ranks=None, gold=[], advance=lambda what, done: None)
    batches = 2
    assert calls == {"snapkv": batches, "laq": batches * len(protocol.budgets)}


def test_a_budget_above_the_prompt_is_the_full_cache(target, tmp_path: Path) -> None:
    protocol = replace(SMALL, budgets=(Budget(ratio=1.0),), tasks=("continue",), prompts=4, rank_prompts=0)
    _, scores = go(target, tmp_path, protocol, ["snapkv", "random"])
    for policy in scores["policies"]:
        for cell in policy["lengths"]:
            (row,) = cell["budgets"]
            assert row["exact"]["value"] == row["share"]["value"] == row["kept_share"] == 1.0


def test_a_continuation_is_judged_by_the_full_cache(target, tmp_path: Path) -> None:
    protocol = replace(SMALL, budgets=(Budget(tokens=16),), tasks=("continue",), max_new_tokens=12)
    pieces, _ = go(target, tmp_path, protocol, ["streaming_llm"])
    prompts = prompts_of(target, protocol)[320]
    plain = Engine(target).generate([p.whole for p in prompts], max_new_tokens=12).tokens
    cut = Engine(target, Parts(evictor=policies.get("streaming_llm", budget=Budget(tokens=16))))
    tokens = cut.generate([p.whole for p in prompts], max_new_tokens=12).tokens
    answers = pieces["streaming_llm", 320]["budgets"][0]["answers"]
    assert pieces["full", 320]["continued"] == [plain]
    assert [a["share"] for a in answers] == [
        agreement(a, b).share for a, b in zip(tokens, plain, strict=True)
    ]


def test_a_run_that_was_killed_goes_on_and_ends_the_same(target, tmp_path: Path) -> None:
    whole = go(target, tmp_path / "whole")[1]
    seen: list[str] = []

    def killed(what: str, done: int) -> None:
        seen.append(what)
        if what == "snapkv window=8 @ 320":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(target, tmp_path / "cut", advance=killed)
    assert len(list((tmp_path / "cut").iterdir())) == 3
    before = {path: path.read_bytes() for path in (tmp_path / "cut").iterdir()}
    resumed = go(target, tmp_path / "cut")[1]
    assert as_json(resumed) == as_json(whole) and accuracy_picture(resumed) == accuracy_picture(whole)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_pieces_of_other_settings_are_refused(target, tmp_path: Path) -> None:
    go(target, tmp_path)
    with pytest.raises(ConfigError, match=r"prompts=6, and prompts=4 .*name=OTHER"):
        go(target, tmp_path, replace(SMALL, prompts=4))
    more = [*ENTRIES, {"name": "random", "window": 8}]
    assert len(go(target, tmp_path, entries=more)[1]["policies"]) == 5  # another policy joins what is there
    with pytest.raises(ConfigError, match="policy="):
        go(target, tmp_path, entries=[{"name": "snapkv", "window": 4, "label": "snapkv window=8"}])
    (tmp_path / next(tmp_path.iterdir()).name).write_text("{")
    with pytest.raises(DataError, match="remove it"):
        go(target, tmp_path)


def test_no_policy_sees_a_question_that_comes_after(
    target, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    seen = []
    kind = policies.policy_class("snapkv")
    own = kind.scores
    monkeypatch.setattr(kind, "scores", lambda self, run: seen.append(run) or own(self, run))
    protocol = replace(SMALL, after=True, lengths=(320,), time_prompts=0)
    _, scores = go(target, tmp_path, protocol)
    prompts = prompts_of(target, protocol)[320]
    assert [n for run in seen for n in run.lengths] == [len(p.context) for p in prompts]
    oracle = scores["policies"][1]["lengths"][0]
    assert oracle["ranks"]["tau"] == pytest.approx(1) and oracle["budgets"][0]["kept_rows"] == 16


def test_the_told_oracle_reads_the_answers_rows_alone(target) -> None:
    """Against attention of one forward over context, question and answer, written out."""
    prompt = prompts_of(target, SMALL)[320][0]
    seen = {}

    class Look:
        name = "look"

        def extra_rows(self, longest):
            return len(prompt.question) + len(prompt.answer_ids)

        def watch(self, lengths):
            return None

        def select(self, run):
            oracle = ToldOracle(Budget(tokens=16))
            oracle.tell([prompt])
            seen["scores"] = oracle.scores(run)

    Engine(target, Parts(evictor=Look())).generate([list(prompt.context)], max_new_tokens=1)
    rows: dict[int, tuple] = {}
    ids = torch.tensor([*prompt.whole, *prompt.answer_ids])
    n, start = len(prompt.context), len(prompt.whole)
    target.forward(
        Rows(torch.arange(len(ids))[None], ids[None]),
        target.new_cache(1, len(ids), 1),
        want=Want("none"),
        watch=lambda layer, q, k, v: rows.__setitem__(layer, (q[0], k[0])),
    )
    for layer, (q_HTD, k_GTD) in rows.items():
        k_HTD = k_GTD.repeat_interleave(2, 0)
        logits = q_HTD @ k_HTD.mT / q_HTD.shape[-1] ** 0.5
        p = logits.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf).softmax(-1)
        want_GS = p[:, start:, :n].mean(1).view(2, 2, n).mean(1)
        torch.testing.assert_close(seen["scores"][layer, 0], want_GS, atol=1e-6, rtol=1e-4)


def test_batches_may_be_larger_than_an_engine_takes_unasked(target, tmp_path: Path) -> None:
    protocol = replace(SMALL, prompts=34, batch=34, lengths=(320,), budgets=SMALL.budgets[:1], rank_prompts=1)
    _, scores = go(target, tmp_path, protocol, ["streaming_llm"])
    assert scores["policies"][2]["lengths"][0]["budgets"][0]["exact"]["n"] == 34


def test_sampled_answers_count_by_prompt(target, tmp_path: Path) -> None:
    heat = Sampling(temperature=1.0)
    protocol = replace(SMALL, sampling=heat, samples=3, lengths=(320,), rank_prompts=0, time_prompts=0)
    pieces, scores = go(target, tmp_path, replace(protocol, tasks=("continue",)), ["streaming_llm"])
    assert len(pieces["full", 320]["budgets"][0]["answers"]) == 6
    first, second, third = pieces["full", 320]["continued"]
    assert first != second != third and [len(one) for one in (first, second, third)] == [6, 6, 6]
    made = {policy["name"]: policy["lengths"][0]["budgets"] for policy in scores["policies"]}
    assert made["full"][0]["exact"]["value"] == 1.0  # each sample is compared with the same coins' answer
    everything = replace(protocol, tasks=("continue",), budgets=(Budget(ratio=1.0),))
    whole = go(target, tmp_path / "whole", everything, ["snapkv"])[1]["policies"][2]["lengths"][0]["budgets"]
    assert whole[0]["share"] == {"value": 1.0, "low": 1.0, "high": 1.0, "n": 6}
    assert made["streaming_llm"][0]["share"]["value"] < 1


@pytest.mark.parametrize(
    ("entries", "protocol", "message"),
    [
        (["snapkw"], SMALL, "unknown eviction policy 'snapkw'; known: .*snapkv"),
        ([{"name": "snapkv", "windows": 3}], SMALL, "no option 'windows'; known: window"),
        (["snapkv"], SMALL, "budget of 16 rows is below the 32"),
        ([{"name": "adakv"}], SMALL, "budget of 16 rows is below the 32"),
        ([{"name": "laq"}], SMALL, "budget of 16 rows is below the 32"),
        ([{"name": "laq", "window": 17}], SMALL, "budget of 16 rows is below the 17"),
        ([{"name": "adakv", "over": "laq"}], SMALL, "budget of 16 rows is below the 32"),
        ([{"name": "kvzip", "sinks": 17}], SMALL, "budget of 16 rows is below the 17"),
        ([{"name": "snapkv", "budget": 3}], SMALL, "policy 'snapkv' has no option 'budget'"),
        ([{"name": "streaming_llm", "sinks": 20}], SMALL, "budget of 16 rows is below the 20"),
        ([{"window": 3}], SMALL, "allowed: NAME"),
        (["streaming_llm", "streaming_llm"], SMALL, "do not differ in name"),
        ([], replace(SMALL, lengths=(508,)), "lengths of at most 507"),
        ([], replace(SMALL, lengths=(100,)), r"100 tokens is too short .*'needles'.* 2\d\d or more"),
        ([], replace(SMALL, tasks=("needle",)), "suite.tasks=.*continue"),
    ],
)
def test_what_cannot_be_run_is_said_before_it_is(target, tmp_path, entries, protocol, message) -> None:
    with pytest.raises(ConfigError, match=message):
        go(target, tmp_path, protocol, entries)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompts": 0}, "suite.prompts=0; allowed: 1 or more"),
        ({"rank_skip": -1}, "suite.rank_skip=-1"),
        ({"lengths": ()}, "lengths="),
        ({"budgets": ()}, "suite.budgets="),
        ({"samples": 2}, "decode.temperature"),
        ({"after": True, "tasks": ("continue",)}, "suite.question=after"),
    ],
)
def test_wrong_settings(keys, message) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **keys)


def test_a_target_without_a_tokenizer(target) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        prompts_of(random_target("llama_micro"), SMALL)


def test_pieces_keep_names_apart(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path)
    pieces.put("a(b)@1", {"n": (1, 2)}, {"x": 1})
    pieces.put("a-b-@1", {"n": [1, 2]}, {"x": 2})
    assert pieces.get("a(b)@1", {"n": [1, 2]}) == {"x": 1} and pieces.get("a-b-@1", {"n": (1, 2)}) == {"x": 2}
    assert pieces.get("c@1", {}) is None and Pieces(None).get("a(b)@1", {}) is None
    assert json.loads(as_json(Pieces(None).put("a", {}, {"y": (1,)}))) == {"y": [1]}
    assert FULL_CACHE.make is None
