"""Recall of attention against attention maps of transformers' eager model, set by set."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from longtrain import methods
from longtrain.cache.entry_sets import ReadBudget
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.roles import Parts
from longtrain.evaluation.recall import NEAR, SINKS, recall
from longtrain.targets.shapes import shape_config
from tests.decoding.micro import prompts_of
from tests.decoding.micro import target as micro

ROWS, PROMPT, STEPS = 14, 100, 8


class BySlot(Selector):
    """Scores that depend on nothing but slot and set; layer 1's heads share a set with layer 0's second."""

    name = "by slot"
    table_LG = torch.tensor([[0, 1], [1, 1]])

    def ahead(self, root_B):
        slot_S = torch.arange(self.cache.used).double()
        return torch.stack([(slot_S * 7 + self.cache.len_B[0]).sin(), (slot_S * 3).cos()]).expand(
            len(root_B), 2, -1
        )


def maps_of(texts):
    """Attention [texts, L, H, T, T] of the whole texts, in fp64."""
    target = micro()
    eager = AutoModelForCausalLM.from_config(
        shape_config("llama_micro"), attn_implementation="eager"
    ).double()
    eager.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        return torch.stack(eager.eval()(torch.tensor(texts), output_attentions=True).attentions, 1).double()


def best(scores, length):
    """Sinks, the last rows and the best of the others; of equal ones the later."""
    forced = {0, 1, *range(length - 4, length)}
    order = sorted(set(range(length)) - forced, key=lambda s: (-float(scores[s]), -s))
    return forced | set(order[: ROWS - len(forced)])


def by_hand(maps_LHTT, every):
    """The figures of one text, written out."""
    sums = dict.fromkeys(
        (
            "total_read",
            "far_mass",
            "far_read",
            "window_read",
            "shared_read",
            "own_read",
            "oracle_read",
            "far_share",
            "shared_share",
        ),
        0.0,
    )
    overlaps, oracle_overlaps, buffered, last = [], [], [], None
    latest = [[], []]  # rows of each set in the order in which they were read last
    for t in range(STEPS):
        n = PROMPT + t
        p = maps_LHTT[:, :, n, : n + 1].unflatten(1, (2, 2)).mean(2)  # [L, G, n + 1]
        if t % every == 0:
            since = n
            slot = torch.arange(n).double()
            own = [best((slot * 7 + n).sin(), n), best((slot * 3).cos(), n)]
        shared = [best(p[:, g].sum(0), n) for g in range(2)]
        mine = [best(p[0, 0], n), best(p[0, 1] + p[1, 0] + p[1, 1], n)]
        each = [[best(p[layer, g], n) for g in range(2)] for layer in range(2)]
        if t % every == 0:
            if last is not None:
                overlaps += [len(a & b) / len(a) for a, b in zip(own, last[0], strict=True)]
                for layer in range(2):
                    pairs = zip(each[layer], last[1][layer], strict=True)
                    oracle_overlaps += [len(a & b) / len(a) for a, b in pairs]
                pairs = zip(own, latest, strict=True)
                buffered += [len(a & {*rows[-2 * ROWS :]}) / len(a) for a, rows in pairs]
            last = own, each
            latest = [
                [s for s in rows if s not in a] + sorted(a) for a, rows in zip(own, latest, strict=True)
            ]
        far = range(SINKS, n - NEAR)
        for layer in range(2):
            for g in range(2):
                row, number = p[layer, g], BySlot.table_LG[layer, g]
                read = own[number] | set(range(since, n + 1))
                sums["total_read"] += float(row[list(read)].sum())
                sums["far_mass"] += float(row[far].sum())
                for name, rows in (
                    ("far_read", read),
                    ("window_read", best(range(n), n)),
                    ("shared_read", shared[g]),
                    ("own_read", mine[number]),
                    ("oracle_read", each[layer][g]),
                ):
                    sums[name] += (mass := float(row[sorted(rows & set(far))].sum()))
                    if name in ("far_read", "shared_read"):
                        sums[name.replace("read", "share")] += mass / float(row[far].sum())
    found = {name: value / (4 * STEPS) for name, value in sums.items()}
    mean = [sum(some) / len(some) for some in (overlaps, oracle_overlaps, buffered)]
    assert mean[2] > mean[0], "rows that come back are what the buffer is for"
    return found | dict(zip(("overlap", "oracle_overlap", "lru_overlap"), mean, strict=True))


@pytest.mark.parametrize("every", [1, 3])
def test_figures_are_those_of_eager_attention(every):
    texts = prompts_of(PROMPT + STEPS, PROMPT + STEPS)
    selector = BySlot(ReadBudget(rows=ROWS, sinks=2, window=4, every=every))
    prompts, given = zip(*((text[:PROMPT], text[PROMPT:]) for text in texts), strict=True)
    found = recall(micro(), selector, prompts, given)
    for one, maps_LHTT in zip(found, maps_of(texts), strict=True):
        expected = by_hand(maps_LHTT, every)
        assert {name: one[name] for name in expected} == pytest.approx(
            expected, abs=1e-6
        )  # eager's softmax is in fp32
        assert one["gained"] == pytest.approx(expected["far_read"] - expected["window_read"])
        assert one["shared_gap_share"] == pytest.approx(expected["shared_share"] - one["window_share"])
        assert one["own_gap"] == pytest.approx(expected["own_read"] - expected["window_read"])
        assert sum(one[f"far_read_{layer}"] for layer in (0, 1)) / 2 == pytest.approx(one["far_read"])
        assert expected["window_read"] < expected["far_read"] < expected["own_read"] < expected["oracle_read"]
    first = recall(micro(), selector, prompts[:1], [given[0][:1]])
    assert first[0]["far_mass"] != found[0]["far_mass"] and not {"overlap", "lru_overlap"} & {*first[0]}
    assert selector.cache is None and not selector.budget.dense_layers


def test_dense_layers_read_everything():
    prompts, given = [one[:PROMPT] for one in prompts_of(108)], [one[PROMPT:] for one in prompts_of(108)]
    budget = ReadBudget(rows=ROWS, sinks=2, window=4, dense_layers=(1,))
    (found,) = recall(micro(), BySlot(budget), prompts, given)
    assert found["far_read_1"] == pytest.approx(found["far_mass_1"])
    assert found["far_read_0"] < found["far_mass_0"]
    assert Parts(selector=BySlot(budget)).selector.budget.dense_layers == (1,)


def test_a_head_is_told_the_states_of_the_whole_cache():
    """An untrained head with two groups of layers, whose oracle is above that of one group. It chooses among
    rows by what the target left when it read everything: its keys are those of one dense pass."""
    target, spec = micro(), methods.get("specontext")
    config = spec.config(sets=2)
    torch.manual_seed(0)
    module = spec.build(config, target.info).to(target.dtype)
    keys = {"budget_tokens": ROWS, "sinks": 2, "window": 4}
    selector = spec.attach(module, target, config, keys).selector
    (text,) = prompts_of(PROMPT + STEPS)
    (found,) = recall(target, selector, [text[:PROMPT]], [text[PROMPT:]])
    assert 0 < found["far_read"] < found["own_read"] and found["shared_read"] < found["own_read"]
    more = {"total_read", "far_mass", "far_read", "own_read", "oracle_read"}
    (first,) = recall(target, selector, [text[:PROMPT]], [text[PROMPT : PROMPT + 5]])
    (later,) = recall(target, selector, [text[: PROMPT + 5]], [text[PROMPT + 5 :]])
    for name in more:  # in two parts the second one's keys are those of one dense pass over the first
        sums = 5 * first[name] + (STEPS - 5) * later[name]
        assert sums == pytest.approx(STEPS * found[name], rel=1e-9), name
