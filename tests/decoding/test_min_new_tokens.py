"""`min_new_tokens`: what ends a text is impossible among its first tokens, for targets and drafts alike."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from scipy import stats
from transformers import MinNewTokensLengthLogitsProcessor

from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import Sampling, probs
from longtrain.errors import ConfigError
from longtrain.targets.step import OutputRequest, TokenBatch

from .toys import OracleDraft, ToyTarget

SHAPES = [TreeShape((1, 1, 1, 1)), TreeShape((3, 4, 2)), TreeShape((1, 4))]
PROMPTS = [[1, 2, 3], [5], [0, 4, 4, 4, 2, 9, 11, 3], [7, 7], [1, 2, 3, 4, 5]]
ENDS = (3, 5, 10)


def engine(target: ToyTarget) -> Engine:
    return Engine(target, Parts(draft=OracleDraft(target)), limits=Limits(batch=100_000))


def reference(target: ToyTarget, prompt: list[int], least: int, most: int) -> list[int]:
    """Greedy decoding by transformers' own processor, the whole text anew for every token."""
    barred = MinNewTokensLengthLogitsProcessor(len(prompt), least, list(ENDS), device="cpu")
    text = list(prompt)
    while len(text) < len(prompt) + most:
        ids_BT = torch.tensor([text])
        rows = TokenBatch(torch.arange(len(text))[None], ids_BT)
        logits_BV = target.forward(
            rows, target.new_cache(1, 200, 1), outputs=OutputRequest("all")
        ).logits_BTV[:, -1]
        text.append(int(barred(ids_BT, logits_BV).argmax()))
        if text[-1] in ENDS:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("least", [0, 1, 7, 40])
def test_greedy_text_is_transformers(least):
    target = ToyTarget(12, eos=ENDS)
    outputs = [reference(target, prompt, least, 40) for prompt in PROMPTS]
    for shape in (PLAIN, *SHAPES):
        for children in ChildChoice:
            got = engine(target).generate(
                PROMPTS, max_new_tokens=40, min_new_tokens=least, shape=TreeShape(shape.widths, children)
            )
            assert got.tokens == outputs
    assert all(not set(ENDS) & set(text[:least]) for text in outputs)
    free = engine(target).generate(PROMPTS, max_new_tokens=40)
    assert (free.tokens != outputs) == (least > 0)


def test_stop_ids_of_a_call_are_barred_and_others_are_not():
    target = ToyTarget(12, eos=(3,))
    free = Engine(target).generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
    assert Engine(target).generate(
        PROMPTS, max_new_tokens=40, ignore_eos=True, min_new_tokens=9
    ).tokens == free.tokens  # fmt: skip
    said = {token for text in free.tokens for token in text[:9]}
    assert 5 in said
    out = Engine(target).generate(PROMPTS, max_new_tokens=40, stop_ids=[5], min_new_tokens=9)
    assert all(5 not in text[:9] for text in out.tokens) and any(3 in text[:9] for text in out.tokens)


@pytest.mark.parametrize("children", ChildChoice)
def test_sampled_texts_follow_the_targets_law_without_the_ends(children):
    n, vocab, prompt = 2_500, 6, [1, 2]
    target, sampling = ToyTarget(vocab, eos=(4,)), Sampling(temperature=1.0, top_p=0.9, seed=11)

    def masked(text: tuple[int, ...]) -> float:
        """Exact probability of three tokens of which the first two may not be 4."""
        rows_VE = torch.stack([target.table_SVE[i, t] for i, t in enumerate([*prompt, *text])]).cumsum(0)
        logits_TV = torch.sin(rows_VE) @ target.out_EV
        logits_TV[[1, 2], 4] = float("-inf")
        p_TV = probs(logits_TV[1:4], sampling)
        return float(torch.stack([p_TV[i, t] for i, t in enumerate(text)]).prod())

    out = engine(target).generate(
        [prompt] * n,
        max_new_tokens=3,
        min_new_tokens=2,
        sampling=sampling,
        shape=TreeShape((2, 3), children),
    )
    texts = list(product(range(vocab), repeat=3))
    p = torch.tensor([masked(text) for text in texts], dtype=torch.float64)
    number = {text: i for i, text in enumerate(texts)}
    count = torch.bincount(torch.tensor([number[tuple(t)] for t in out.tokens]), minlength=len(texts))
    assert count[p == 0].sum() == 0 and p.sum() == pytest.approx(1)
    rare = p * n < 8
    observed = torch.cat((count[~rare], count[rare].sum()[None])).double()
    expected = torch.cat((p[~rare], p[rare].sum()[None])) * n
    some = expected > 0
    assert stats.chisquare(observed[some], expected[some]).pvalue > 1e-4


def test_a_negative_count_is_refused():
    with pytest.raises(ConfigError, match="min_new_tokens=-1; allowed: 0 or more"):
        Engine(ToyTarget(12)).generate([[1]], max_new_tokens=4, min_new_tokens=-1)
