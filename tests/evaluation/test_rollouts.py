"""Texts of the full cache, told to other systems: against decoding by itself, and against perplexity."""

from __future__ import annotations

import pytest
import torch

from longtrain.cache.entry_sets import ReadBudget
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import Parts
from longtrain.decoding.sampling import Sampling
from longtrain.errors import DataError
from longtrain.evaluation.analysis.numbers import stretches_of
from longtrain.evaluation.perplexity import measure, predicted_logits, read_contexts
from longtrain.evaluation.records import Record
from longtrain.evaluation.rollouts import Rollout, RolloutWriter, Steps, follow, full_states, stretches
from longtrain.methods.sparse.config import Config
from longtrain.methods.sparse.spec import RULES
from tests.decoding.micro import prompts_of
from tests.decoding.micro import target as micro

NEW = 24


@pytest.fixture(scope="module")
def target():
    return micro()


def sparse(target, *, rows=10, every=1):
    budget = ReadBudget(rows=rows, sinks=1, window=2, every=every)
    return Parts(selector=RULES["quest"](budget, Config(rule="quest", page=2), target), name="quest")


@pytest.mark.parametrize(("sampling", "every"), [(Sampling(), 1), (Sampling(0.9, 0.95, 20, 3), 4)])
def test_the_first_token_of_its_own_is_where_free_decoding_departs(target, tmp_path, sampling, every):
    prompts = dict(enumerate(map(list, prompts_of(9, 12, 7, 11)), 5))
    written = RolloutWriter(tmp_path, NEW, sampling, ignore_eos=True).write(target, prompts)
    found = follow(target, sparse(target, every=every), written, sampling)
    free = Engine(target, sparse(target, every=every)).generate(
        list(prompts.values()),
        max_new_tokens=NEW,
        sampling=sampling,
        ignore_eos=True,
        sequence_ids=list(prompts),
    )
    places = []
    for text, own, steps in zip(written, free.tokens, found, strict=True):
        here = next((i for i, (a, b) in enumerate(zip(text.text, own, strict=True)) if a != b), NEW)
        assert steps.metrics([])["own_tokens"] == here
        places.append(here)
    assert min(places) < NEW
    for steps in follow(target, Parts(), written, sampling):
        assert all(steps.own) and all(steps.agreed) and max(steps.divergence) < 1e-9


def test_the_repeated_tokens_of_each_text_are_counted(target):
    written = []
    for number, text in enumerate(((*range(8), *range(8)), tuple(range(16)))):
        (states_NE,) = full_states(target, [[3, 4]], [text])
        written.append(Rollout((3, 4), text, number, states_NE))
    found = [steps.metrics([(0, 16)]) for steps in follow(target, Parts(), written, Sampling())]
    assert [one["repeated_tokens"] for one in found] == [8, 0]


def test_costs_are_those_of_perplexity(target, tmp_path):
    sampling = Sampling(1.0)
    written = RolloutWriter(tmp_path, NEW, sampling).write(target, {0: [5, 6, 7, 8], 1: [9, 3, 4, 1, 2]})
    prompts, texts = [one.prompt for one in written], [one.text for one in written]

    def laws(parts):
        read, found = read_contexts(target, parts, prompts, scored=texts), [[] for _ in texts]
        for row, _, logits_TV in predicted_logits(target, read, texts, selector=parts.selector):
            found[row].append(logits_TV.double().log_softmax(-1))
        return [torch.cat(some) for some in found]

    costs = measure(target, sparse(target), prompts, scored=texts)
    followed = follow(target, sparse(target), written, sampling)
    for nats, steps, full_NV, own_NV in zip(
        costs, followed, laws(Parts()), laws(sparse(target)), strict=True
    ):
        sums = steps.metrics([])
        divergence = float((full_NV.exp() * (full_NV - own_NV)).sum())
        assert sums["nats"] == pytest.approx(nats.nats)
        assert sums["agreed"] == int((full_NV.argmax(-1) == own_NV.argmax(-1)).sum())
        assert sums["divergence"] == pytest.approx(divergence) and divergence > 0


def test_a_text_is_written_once(target, tmp_path, monkeypatch):
    writer, prompts = RolloutWriter(tmp_path, 6, Sampling(1.0)), {4: [5, 6, 7], 9: [8, 9]}
    first = writer.write(target, {4: prompts[4]})
    both = writer.write(target, prompts)
    assert both[0].text == first[0].text and len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(Engine, "generate", None)
    again = writer.write(target, prompts)
    assert [one.text for one in again] == [one.text for one in both]
    assert all(torch.equal(a.states_NE, b.states_NE) for a, b in zip(again, both, strict=True))
    for file in tmp_path.iterdir():
        file.write_text('{"tokens": []}')
    with pytest.raises(DataError, match="holds no text that the full cache wrote; remove it"):
        writer.write(target, prompts)


def test_stretches_double_and_become_records():
    assert stretches(4096, 256)[:3] == [(0, 256), (256, 512), (512, 1024)]
    assert stretches(40, 16) == [(0, 16), (16, 32), (32, 40)] and stretches(8, 16) == [(0, 8)]
    steps = Steps([1.0, 2.0, 3.0], [True, False, True], [0.0, 0.5, 0.25], [True, True, False])
    measures = steps.metrics([(0, 2), (2, 4), (4, 8)])
    assert measures["own_tokens"] == 2 and measures["nats"] == 6 and measures["agreed"] == 2
    parts = stretches_of(Record("s", "t", "e", {"kind": "book"}, score=2 / 3, measures=measures))
    assert [(one.facets, one.score) for one in parts] == [({"position": 2}, 0.5), ({"position": 4}, 1.0)]
    assert parts[1].measures == {"nats": 3.0, "tokens": 1.0, "agreed": 1.0, "divergence": 0.25}
