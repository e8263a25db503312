"""Texts that begin alike are tokenised from where they differ, and into the same tokens as each alone."""

import numpy as np
import pytest

from longtrain.data.chat import mask
from longtrain.data.chat.mask import render
from longtrain.data.chat.prefixes import Prefixes

WORDS = [
    "a",
    "b",
    " ",
    "  ",
    "ab",
    "\n",
    "é",
    "<",
    "<|x|>",
    "<|y|>",
    "<|x",
    "|>y",
    "<|x|>y",
    "y<|x|>",
    "<|z|>",
    "<w>",
    "<l>",
    "<n>",
]


def fast(pre, normalizer=None):
    """A tokenizer of pairs of letters, with added tokens that look at what is around them, or overlap."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*"ab<|>xyzwln ▁\néĠĊÃ©"})
    pairs = [("a", "b"), ("▁", "a"), ("Ġ", "a"), ("Ċ", "a"), ("|", ">"), ("b", "<"), ("Ġ", "<")]
    vocab = {text: i for i, text in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    inner.pre_tokenizer, inner.normalizer = pre, normalizer
    inner.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<|x|>", "<|y|>", "<|z|>", "y<|x|>y<")]
    )
    inner.add_tokens(
        [
            AddedToken("<w>", single_word=True, normalized=False),
            AddedToken("<l>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("<n>", normalized=True),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def kinds():
    from tokenizers import normalizers, pre_tokenizers

    yield "bytes", fast(pre_tokenizers.ByteLevel(add_prefix_space=False))
    yield "bytes after a space", fast(pre_tokenizers.ByteLevel(add_prefix_space=True))
    yield "a mark at the first word", fast(pre_tokenizers.Metaspace(prepend_scheme="first"))
    yield "a mark at each part", fast(pre_tokenizers.Metaspace(prepend_scheme="always"))
    joined = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    yield "a mark before the text", fast(None, joined)


@pytest.mark.parametrize("kind", range(5))
def test_each_text_has_the_tokens_that_it_has_alone(kind):
    _, tokenizer = list(kinds())[kind]
    assert Prefixes.serves(tokenizer)
    prefixes, rng = Prefixes(tokenizer), np.random.default_rng(kind)
    for _ in range(60):
        whole = "".join(WORDS[i] for i in rng.integers(0, len(WORDS), 30))
        cuts = rng.integers(0, len(whole), 6).tolist()
        other = "".join(WORDS[i] for i in rng.integers(0, len(WORDS), 5))
        for text in (whole, *(whole[:cut] for cut in cuts), whole[: cuts[0]] + other, whole, ""):
            alone = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert prefixes.encode(text).tolist() == alone, text


def test_no_text_is_split_at_a_token_that_depends_on_what_follows():
    from tokenizers import Regex, normalizers, pre_tokenizers

    normalizer = normalizers.Replace(Regex("b<n>a"), "é")
    tokenizer = fast(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer)
    for known, text in (("y<|x|>a", "y<|x|>y<"), ("b<n>b", "b<n>a"), (" <w> ", " <w>a")):
        prefixes = Prefixes(tokenizer)
        for one in (known, text):
            assert prefixes.encode(one).tolist() == tokenizer(one, add_special_tokens=False)["input_ids"]


def test_what_texts_have_in_common_is_tokenised_once():
    _, tokenizer = next(kinds())
    read = []

    class Counted:
        added_tokens_decoder = tokenizer.added_tokens_decoder

        def __call__(self, text, **options):
            read.append(text)
            return tokenizer(text, **options)

    prefixes = Prefixes(Counted())
    for text in ("<|y|>aa<|y|>b", "<|y|>aa<|y|>bb<|y|>a<|x|>", "<|y|>aa<|y|>", "<|y|>aa<|y|>bb<|y|>ab"):
        prefixes.encode(text)
    # <|x|> is a part of another added token
    assert read == ["<|y|>aa<|y|>b", "<|y|>bb<|y|>a<|x|>", "<|y|>", "<|y|>ab"]


def test_a_tokenizer_of_its_own_kind_is_left_to_itself(tokenizer):
    class Own(type(tokenizer)):
        def apply_chat_template(self, *args, **options):
            return super().apply_chat_template(*args, **options)

    assert Prefixes.serves(tokenizer)
    tokenizer.split_special_tokens = True
    assert not Prefixes.serves(tokenizer)
    tokenizer.split_special_tokens, tokenizer.__class__ = False, Own
    assert not Prefixes.serves(tokenizer) and not Prefixes.serves(object())


def test_masks_are_those_of_tokenising_all_again(tokenizer, monkeypatch):
    chat = [{"role": role, "content": f"{role} {n}\n é"} for n in range(4) for role in ("user", "assistant")]
    found = [render(tokenizer, chat[: 2 * n], how="prefix", name="x") for n in (1, 3, 2, 4)]
    monkeypatch.setattr(mask, "_renderer", None)
    monkeypatch.setattr(Prefixes, "serves", lambda _: False)
    for one, n in zip(found, (1, 3, 2, 4), strict=True):
        again = render(tokenizer, chat[: 2 * n], how="prefix", name="x")
        assert np.array_equal(one.ids_T, again.ids_T) and np.array_equal(one.mask_T, again.mask_T)
        assert one.mask_T.any()
