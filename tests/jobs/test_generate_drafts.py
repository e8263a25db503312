"""Untrained drafts from the command line: the text of plain decoding, and clear refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from byte_tokens import said

from longtrain.decoding.engine import PLAIN
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.stats import Stats, counted
from longtrain.errors import ConfigError
from longtrain.jobs import generate

CALL = [
    "decode.max_new_tokens=12",
    "target.path=tiny",
    "prompt='" + "The quick brown fox jumps over the lazy dog. " * 20 + "'",
]


def test_the_text_of_plain_decoding(composed, capsys):
    def run(*more):
        generate.run(composed("generate", *CALL, *more))
        return said(capsys)

    plain, alone = run("decode=autoregressive")
    assert "accepted" not in alone
    for more in (
        ["method=magicdec"],
        ["method=magicdec", "method.policy=snapkv", "method.budget=0.25", "decode.shape=[1,1]"],
        ["method=prompt_lookup", "method.ngram=3"],
        ["method=prompt_lookup", "decode.shape=auto"],
        ["method=magicdec", "decode.lookup=off"],
        ["method=magicdec", "decode.lookup=only"],
        ["decode.lookup=only"],
    ):
        text, about = run(*more)
        assert text == plain, more
        if "decode.shape=auto" not in more:  # auto may find that drafting does not pay here
            assert "accepted" in about and " | draft " in about
        assert "copied by look-up" in about or "decode.lookup=off" in more or "decode.shape=auto" in more
    quantised, _ = run("method=quantspec", "method.draft=false")
    text, about = run("method=magicdec", "method.cache=hierarchical")
    assert text == quantised and "accepted" in about
    evicted, _ = run("evict=snapkv", "evict.budget_tokens=40", "decode=autoregressive")
    text, about = run("method=prompt_lookup", "evict=snapkv", "evict.budget_tokens=40")
    assert text == evicted and "kept 40" in about and "accepted" in about


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=magicdec", "method.policy=h2o"], "method.policy=h2o; allowed: streaming_llm, snapkv"),
        (["method=magicdec", "method.budget=2"], r"method.budget=2.0; allowed: above 0, at most 1"),
        (["method=magicdec", "decode.shape=[2,2]"], r"MagicDec drafts chains, and shape \[2, 2\] is none"),
        (["method=magicdec", "method.cache=int4"], "method.cache=int4; allowed: plain, hierarchical"),
        (["method=prompt_lookup", "method.ngram=0"], "method.ngram=0; allowed: a whole number from 1 to 128"),
        (["method=prompt_lookup", "decode.shape=[2,2]"], "prompt look-up drafts chains"),
    ],
)
def test_what_is_refused(composed, words, message):
    with pytest.raises(ConfigError, match=message):
        generate.run(composed("generate", *CALL, *words))


def test_cycles_of_each_shape_are_named_and_none_is_lost():
    chain = TreeShape((1, 1))
    used = {PLAIN: 3, chain: 4, TreeShape((1, 1), ChildChoice.IID): 1, replace(chain, copied=5): 2}
    used |= {TreeShape((), copied=7): 6, TreeShape((4, 8), copied=3): 1}
    about = generate.statistics(Stats(shapes=counted(used)), Parts())
    assert "cycles plain 3, chain-2 5, 4-8+look-up-3 1, look-up-7 6, chain-2+look-up-5 2 |" in about
