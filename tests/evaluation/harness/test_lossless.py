"""Texts that part: how far rounding is from an explanation, what is noted and what fails."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from longtrain import methods
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import LongtrainError
from longtrain.evaluation.harness import lossless
from longtrain.evaluation.harness.lossless import WINDOW, enforce, gap_of
from longtrain.evaluation.harness.rounding import Passage, logits_at_once, logits_in_steps
from longtrain.journals import read_journal, with_checksum
from longtrain.methods import policies
from longtrain.methods.kvzap.runtime import KVzapEvictor
from longtrain.systems import FULL_CACHE, System
from longtrain.systems.system import ARTIFACT, COMBINED
from longtrain.targets.loading import load_target, random_target
from tests.helpers import HEADS_OF_64, attached

from .toys import suite, task

CHAIN = TreeShape((1, 1))
NEW = 8


def draft_for(target):
    return attached("longspec", target, window=16).draft


def systems_for(target, *, shape=CHAIN, pair="full"):
    return [FULL_CACHE, System("draft", ARTIFACT, "draft", None, Parts(draft_for(target)), shape, {}, pair)]


def journal_of(made, name):
    (path,) = (made.folder / "journals").glob(f"{name}-*.jsonl")
    return path


def change(made, name, edit, example="copy-1"):
    """`edit(turn)` in the record of an example, as if the system had given it."""
    path = journal_of(made, name)
    lines = [values for _, values in read_journal(path, advice="")]
    for line in lines[1:]:
        for record in line["payload"]["records"]:
            if record["example"] == example:
                edit(record["turns"][-1])
    path.write_bytes(b"".join(map(with_checksum, lines)))


def exchange(at, token):
    def edit(turn):
        turn["tokens"][at] = token

    return edit


def shorten(turn):
    del turn["tokens"][4:]


@pytest.fixture(scope="module")
def half(target_folder):
    return load_target(target_folder, dtype="bfloat16")


def outcome(session, target, edit=None, **changes):
    """What a run says whose drafted text was changed after it was decoded."""
    asked = suite(task(examples=3, new=NEW))
    made = session(asked=asked, entries=(), target=target, systems=systems_for(target), **changes)
    made.work()
    if edit is not None:
        change(made, "draft", edit)
    found = made.finish().results
    return made, found, found["systems"][1]["tasks"][0]["exactness"]


def test_a_gap_is_that_of_the_logits_where_texts_part(session, half):
    made, *_ = outcome(session, half)
    record = next(r for r in made.records(made.systems[:1]) if r.example == "copy-1")
    example = next(e for e in made.suite.tasks[0].examples() if e.id == "copy-1")
    ids = made.suite.tasks[0].encode(example, half.tokenizer, max_tokens=100).ids
    text = torch.tensor([*ids, *record.turns[0].tokens[:3]])
    hidden = half.packed(text, torch.arange(len(text)), (0, len(text))).hidden[-1][-1]
    logits = half.head(hidden).float()
    worst = int(logits.argmin())
    expected = float(logits.max() - logits.min())
    _, found, exact = outcome(session, half, exchange(3, worst), folder=made.folder.parent / "again")
    assert not exact["strict"] and exact["judged"] and exact["compared"] == 3
    (first,) = (one for one in exact["first"] if one["example"] == "copy-1")
    noise = exact["noise"]
    assert first["position"] == 3 and first["gap"] == pytest.approx(expected, abs=2e-2)
    assert first["multiple"] == pytest.approx(first["gap"] / noise["largest"])
    assert 0 < noise["largest"] < 0.2 * expected and noise["allowed"] == 2 * noise["largest"]
    assert noise["texts"] == len(exact["first"]) and noise["tokens"] == WINDOW * noise["texts"]
    assert exact["violations"] == exact["wrong"] == 1
    assert any(note.startswith("drafted texts of draft in task copy differ") for note in found["notes"])


def test_the_noise_is_measured_where_texts_differ_and_on_so_many_of_them(session, half, monkeypatch):
    reads = []
    real = lossless.noise_of
    monkeypatch.setattr(lossless, "noise_of", lambda *a, **k: reads.append(k["rows"]) or real(*a, **k))
    monkeypatch.setattr(lossless, "MEASURED", 1)
    made, _, exact = outcome(session, half, exchange(3, 9))
    reads.clear()
    change(made, "draft", exchange(2, 9), "copy-2")
    exact = replace(made).finish().results["systems"][1]["tasks"][0]["exactness"]
    assert exact["different"] >= 2 and all(one["gap"] is not None for one in exact["first"])
    assert reads == [CHAIN.n_nodes] and exact["noise"]["texts"] == 1


def test_no_noise_is_measured_where_the_spacing_of_the_numbers_explains_every_gap(session, half, monkeypatch):
    measured = []
    monkeypatch.setattr(lossless, "noise_of", lambda *a, **k: measured.append(k["above"]) or 0.0)
    made, _, exact = outcome(session, half, exchange(3, 9))
    gap = exact["largest_gap"]
    assert measured and exact["violations"] == 1
    measured.clear()
    for spaces, needed in ((gap / 2, False), (gap / 2 * 0.99, True)):
        monkeypatch.setattr(lossless, "spacing", lambda *_, spaces=spaces: spaces)
        exact = replace(made).finish().results["systems"][1]["tasks"][0]["exactness"]
        assert bool(measured) == needed and exact["violations"] == needed
        assert exact["noise"]["largest"] == spaces and bool(exact["noise"]["texts"]) == needed


def test_texts_that_stop_elsewhere_are_wrong_in_any_precision(session, half):
    _, found, exact = outcome(session, half, shorten)
    assert exact["wrong"] == 1 and exact["first"][-1]["gap"] is None
    with pytest.raises(
        LongtrainError, match=r"output of draft in task copy differs .*1 of them|engine is wrong"
    ):
        enforce(found)


def test_in_single_precision_on_a_cpu_every_difference_is_wrong(session, target):
    _, found, exact = outcome(session, target, exchange(2, 9))
    assert (exact["different"], exact["violations"], exact["wrong"], exact["strict"]) == (1, 1, 1, True)
    with pytest.raises(LongtrainError, match=r"differs from decoding without the draft: 1 of 3 texts, 1 of"):
        enforce(found)


def test_equal_texts_pass_without_a_note(session, target):
    _, found, exact = outcome(session, target)
    assert (exact["compared"], exact["different"], exact["violations"], exact["first"]) == (3, 0, 0, [])
    assert exact["noise"] is None
    assert not [note for note in found["notes"] if "draft" in note]
    enforce(found)


def test_sampled_texts_in_low_precision_are_only_counted(session, half):
    _, found, exact = outcome(session, half, exchange(2, 9), sampling=Sampling(temperature=1.0))
    assert exact["different"] >= 1 and not exact["judged"]
    assert exact["violations"] == exact["wrong"] == 0
    enforce(found)


def results(**compared):
    """Assembled results with what was compared: system -> gaps, or None where nothing was."""
    systems = []
    for name, gaps in compared.items():
        exact = gaps and {
            "compared": 4,
            "different": len(gaps),
            "violations": sum(gap > 0.2 for gap in gaps),
            "wrong": sum(gap > 0.4 for gap in gaps),
            "noise": {"largest": 0.1},
            "first": [{"example": "x", "turn": 1, "position": 3, "gap": gap} for gap in gaps],
        }
        systems.append({"name": name, "tasks": [{"task": "copy", "exactness": exact}]})
    return {"systems": systems}


def test_what_exceeds_rounding_is_warned_of_and_the_rest_an_error(caplog):
    caplog.set_level("INFO")
    enforce(results(a=[1e-2], b=None, c=[0.3]))
    (told,) = caplog.records
    assert told.levelname == "WARNING" and told.getMessage() == (
        "output of c in task copy differs from decoding without the draft: 1 of 4 texts, 1 of them beyond "
        "rounding (logits move by up to 0.1); first in example x, turn 1, token 3"
    )
    with pytest.raises(LongtrainError, match=r"output of d .*2 of them beyond rounding .*; output of e "):
        enforce(results(d=[1.5, math.inf], c=[0.3], e=[1.5, math.inf]))
    assert len(caplog.records) == 2  # the other is told before it


def test_a_draft_without_anything_to_compare_with_is_noted(session, target):
    evictor = policies.get("snapkv", budget=Budget(40))
    parts = Parts(draft_for(target), evictor)
    both = System(
        "both",
        COMBINED,
        "both",
        "40",
        parts,
        CHAIN,
        {"artifacts": [], "policy": {"policy": "snapkv"}, "budget": "40"},
    )
    made = session(asked=suite(task(examples=2)), entries=(), systems=[FULL_CACHE, both])
    made.work()
    (note,) = made.finish().results["notes"]
    assert note == (
        "texts of both are not compared with decoding without the draft: no system of this run has the same "
        "cache and no draft"
    )
    greedy = [system for system in systems_for(target) if system.drafts]
    no_baseline = replace(suite(task(examples=2)), full_cache=False)
    alone = session("alone", no_baseline, (), systems=greedy)
    alone.work()
    notes = alone.finish().results["notes"]
    assert notes and all(
        line.endswith("no system of this run has the same cache and no draft") for line in notes
    )
    iid = systems_for(target, shape=TreeShape((1, 1), ChildChoice.IID), pair=None)
    sampled = session("second", suite(task(examples=2)), (), systems=iid, sampling=Sampling(temperature=1.0))
    sampled.work()
    (note,) = sampled.finish().results["notes"]
    assert note.endswith("draft: its drafts are sampled, so that equal texts are not to be expected")


@pytest.mark.parametrize("kind", ["plain", "snapkv", "kvzap", "quantspec"])
def test_the_logits_of_a_gap_are_those_that_were_decoded_from(kind):
    """The engine's choice never has a gap, with whatever evictor and cache; without these some has."""
    target = random_target(HEADS_OF_64, seed=0)
    prompt = torch.randint(97, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    parts = Parts()
    if kind == "snapkv":
        parts = Parts(evictor=policies.get("snapkv", budget=Budget(33)))
    if kind == "quantspec":
        parts = attached("quantspec", target, draft=False)
    if kind == "kvzap":  # goes on evicting while the answer grows
        spec = methods.get("kvzap")
        module = spec.build(spec.config(), target.info)
        options = {"decoding": True, "stride": 4, "window": 3}
        parts = Parts(evictor=KVzapEvictor(module, spec.config(), Budget(40), **options))
    (tokens,) = Engine(target, parts).generate([prompt], max_new_tokens=24, ignore_eos=True).tokens
    passage = Passage(prompt, tokens, max_new_tokens=24)
    readings = [logits_at_once(target, parts, passage)]
    readings += [logits_in_steps(target, parts, passage, rows=rows) for rows in (1, 5)]
    assert [gap_of(logits_TV, tokens) for logits_TV in readings] == [0.0] * 3
    late = logits_in_steps(target, parts, replace(passage, first=7), rows=2)
    torch.testing.assert_close(late, readings[0][7:])
    other = next(token for token in range(97) if token not in tokens)
    assert all(gap_of(logits_V[None], [other]) > 0 for logits_V in readings[0])
    if kind in ("snapkv", "kvzap"):
        assert gap_of(logits_at_once(target, Parts(), passage), tokens) > 0


def test_tokens_that_were_impossible_are_no_rivals(target):
    prompt = list(range(40))
    (best,) = Engine(target).generate([prompt], max_new_tokens=1, ignore_eos=True).tokens[0]
    limited = Engine(target).generate([prompt], max_new_tokens=1, stop_ids=[best], min_new_tokens=1).tokens[0]
    (second,) = limited
    assert second != best
    logits_TV = logits_at_once(target, Parts(), Passage(prompt, [second]))
    assert gap_of(logits_TV, [second]) > 0
    assert gap_of(logits_TV, [second], barred=[best], bars=1) == 0
    assert gap_of(logits_TV, [second], barred=[best], bars=0) > 0
    assert gap_of(logits_TV, [best], barred=[best], bars=1) == math.inf
