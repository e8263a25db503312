"""Drafts copied from the text: what is found, what is copied, and the target's own text."""

from __future__ import annotations

import pytest
import torch

from longtrain import methods
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape, Verdict
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError
from longtrain.kernels.suffix_match import NONE, longest_match
from longtrain.methods.prompt_lookup.config import Config
from longtrain.methods.prompt_lookup.history import History
from longtrain.methods.prompt_lookup.runtime import PromptLookupRuntime
from longtrain.targets.loading import random_target
from tests.automaton import longest_suffix
from tests.helpers import ONE_LAYER, attached, chi_square

SPEC = methods.get("prompt_lookup")
CHAIN = TreeShape((1,) * 4)


@pytest.fixture(scope="module")
def target():
    """In fp64, so that no tie is decided by the number of rows of a step."""
    return random_target("llama_micro", seed=1, dtype=torch.float64)


def parts_of(target, **keys) -> Parts:
    return attached("prompt_lookup", target, **keys)


def looked_up(text: list[int], ngram: int, count: int) -> list[int]:
    """The draft by its definition, with lists; the last token again where nothing matches."""
    last = len(text) - 1
    for n in range(min(ngram, last), 0, -1):
        for end in range(last - 1, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[last - n + 1 :]:
                out = list(text)
                for _ in range(count):
                    out.append(out[len(out) - (last - end)])
                return out[last + 1 :]
    return [text[-1]] * count


class Lengths:
    """Stands in for a cache."""

    def __init__(self, *lengths: int) -> None:
        self.len_B = torch.tensor(lengths)


def drafted(target, texts, ngram=3, count=5, children=ChildChoice.POINT):
    """What is drafted for texts whose last token is the root."""
    runtime = PromptLookupRuntime(ngram)
    longest = max(map(len, texts))
    tokens_BS = torch.tensor([[*text[:-1], *[0] * (longest - len(text))] for text in texts])
    n_B = torch.tensor([len(text) - 1 for text in texts])
    runtime.start(tokens_BS, n_B, None, Lengths(*n_B.tolist()))
    root_B = torch.tensor([text[-1] for text in texts])
    return runtime, runtime.propose(root_B, TreeShape((1,) * count, children), Sampling(), None)


def test_the_longest_match_then_the_latest(target):
    texts = [
        [1, 2, 3, 4, 9, 2, 3, 5, 3, 6, 8, 1, 2, 3],  # 1 2 3 -> 4 9 2 3 5
        [7, 2, 3, 4, 5, 2, 3, 6, 8, 8, 8, 1, 2, 3],  # 2 3, the later one -> 6 8 8 8 1
        [3, 5, 5, 5, 6, 7, 3, 1, 0, 2, 4, 9, 8, 3],  # 3, the later one -> 1 0 2 4 9
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],  # nothing
        [9, 4, 7, 4, 7],  # a loop goes on
        [5, 5],
    ]
    _, tree = drafted(target, texts)
    assert tree.tokens_BN[:, 1:].tolist() == [
        [4, 9, 2, 3, 5],
        [6, 8, 8, 8, 1],
        [1, 0, 2, 4, 9],
        [13] * 5,
        [4, 7, 4, 7, 4],
        [5] * 5,
    ]
    assert tree.children is ChildChoice.POINT and tree.q_BNV is None
    assert tree.parents_BN[0].tolist() == [-1, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("ngram", [1, 2, 3, 5, 64])
def test_it_is_its_definition(target, ngram):
    gen = torch.Generator().manual_seed(ngram)
    lengths = [1, 2, 3, 4, 7, 12, 40, 80, 81, 300]
    texts = [torch.randint(3, (n,), generator=gen).tolist() for n in lengths]
    _, tree = drafted(target, texts, ngram, 6)
    assert tree.tokens_BN[:, 1:].tolist() == [looked_up(text, ngram, 6) for text in texts]


def longest_overlap(text: list[int]) -> tuple[int, int]:
    """The longest match by comparing lists, and the distance back to its latest place."""
    last, best, back = len(text) - 1, 0, 1
    for end in range(last - 1, -1, -1):
        agree = 0
        while agree <= end and text[end - agree] == text[last - agree]:
            agree += 1
        if agree > best:
            best, back = agree, last - end
    return best, back


@pytest.mark.parametrize("vocab", [1, 2, 3, 5])
def test_the_match_is_a_suffix_automatons(vocab):
    """Random texts, some repeated; in a ring that has gone round twice before as well."""
    gen = torch.Generator().manual_seed(vocab)
    for trial in range(40):
        length = int(torch.randint(1, 61, (1,), generator=gen))
        text = torch.randint(vocab, (length,), generator=gen).tolist()
        text = (text * 3)[:60] if trial % 3 == 0 else text
        matched, back = longest_overlap(text)
        assert longest_suffix(text) == matched
        for first in (0, 130):  # of the positions
            ring = torch.full((1, 64), NONE, dtype=torch.int32)
            ring[0, torch.arange(first, first + len(text)) % 64] = torch.tensor(text, dtype=torch.int32)
            found = longest_match(ring, torch.tensor([first + len(text) - 1]), 63, 1)
            assert [one.item() for one in found[:2]] == [matched, back]
            found = longest_match(ring, torch.tensor([first + len(text) - 1]), 2, 1)
            assert found[0].item() == min(matched, 2)


def test_a_match_ends_at_the_oldest_token_of_a_full_ring():
    """Beyond it are the newest tokens, which precede nothing."""
    ring = torch.tensor([[7, 7, 7, 7]], dtype=torch.int32)
    assert [one.item() for one in longest_match(ring, torch.tensor([9]), 4, 1)[:2]] == [3, 1]


@pytest.mark.parametrize(("slots", "most", "least"), [(6, 2, 2), (0, 1, 2), (1, 1, 2), (4, 5, 5)])
def test_a_ring_that_matches_do_not_fit_is_refused(slots, most, least):
    said = (
        rf"a buffer of {slots} places for matches of {most}; allowed: a power of two from {least} on, below"
    )
    with pytest.raises(DataError, match=said):
        longest_match(torch.zeros(1, slots, dtype=torch.int32), torch.tensor([1]), most, 1)


def test_accepted_tokens_are_text_at_once(target):
    gen = torch.Generator().manual_seed(0)
    texts = [torch.randint(4, (n,), generator=gen).tolist() for n in (9, 30)]
    runtime, tree = drafted(target, texts)
    for _ in range(30):
        n_B = torch.randint(0, 7, (2,), generator=gen)
        runtime.cache.len_B = runtime.cache.len_B + n_B
        runtime.observe(tree, Verdict(torch.arange(6).expand(2, -1), n_B, n_B), None)
        root_B = torch.randint(4, (2,), generator=gen)
        for text, n, row, root in zip(
            texts, n_B.tolist(), tree.tokens_BN.tolist(), root_B.tolist(), strict=True
        ):
            del text[-1:]
            text += [*row[:n], root]
        assert [len(text) - 1 for text in texts] == runtime.cache.len_B.tolist()
        tree = runtime.propose(root_B, TreeShape((1,) * 5), Sampling(), None)
        assert tree.tokens_BN[:, 1:].tolist() == [looked_up(text, 3, 5) for text in texts]


def test_a_text_longer_than_the_ring_forgets_its_beginning():
    history = History(1, 4, torch.device("cpu"))
    slots = history.slots
    assert slots == 8192
    gen = torch.Generator().manual_seed(0)
    text = torch.randint(1000, (1, 3 * slots), generator=gen)
    text[0, 10:13] = text[0, -3:]  # long ago
    text[0, slots : slots + 3] = text[0, -3:]  # as well
    for first in range(0, 3 * slots, 64):
        history.put(text[:, first : first + 64], torch.tensor([first]), torch.tensor([64]))
    last = 3 * slots - 1
    recent = text[0].tolist()

    def copied(count):
        return history.extend(text[:, -1], torch.tensor([last]), count, 3)[0][0].tolist()

    assert recent[slots + 3 : slots + 9] != copied(6) == looked_up(recent[-slots:], 3, 6)
    text[0, last - 500 : last - 497] = text[0, -3:]
    history.put(text[:, last - 500 : last - 436], torch.tensor([last - 500]), torch.tensor([64]))
    assert copied(6) == text[0, last - 497 : last - 491].tolist()


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7, top_p=0.95, seed=3)], ids=["greedy", "sampled"]
)
def test_the_text_is_the_targets_own(target, sampling):
    gen = torch.Generator().manual_seed(2)
    texts = [torch.randint(97, (n,), generator=gen).tolist() for n in (1, 2, 17, 70)]
    engine = Engine(target, parts_of(target))
    options = {"max_new_tokens": 60, "sampling": sampling, "ignore_eos": True}
    plain = engine.generate(texts, shape=PLAIN, **options)
    out = engine.generate(texts, shape=TreeShape((1,) * 6), **options)
    assert out.tokens == plain.tokens and out.stats.draft_bytes > 0
    assert sampling.temperature or out.stats.tau > 1.3


@pytest.mark.parametrize("children", [ChildChoice.IID, ChildChoice.NO_REPLACE])
def test_as_a_sampled_chain_it_follows_the_targets_law(children):
    """The law of its drafts is that of a certain token."""
    target = random_target("llama_micro", seed=3)
    engine = Engine(target, parts_of(target), limits=Limits(batch=200))
    sampling = Sampling(temperature=1.5, top_k=3, seed=1)
    prompt, shape = [5, 6, 7, 8, 9, 10] * 3, TreeShape((1, 1), children)
    chi2, stats = chi_square(engine, prompt, shape, sampling, tokens=5, runs=200)
    assert chi2 < 51.2 and stats.acceptance_rate > 0.02  # 99.9% at 24 degrees of freedom


def test_on_another_cache_and_its_memory(target):
    wide = random_target(ONE_LAYER, seed=3, dtype=torch.float64)
    cache = attached("quantspec", wide, draft=False)
    parts = parts_of(wide).merge(cache)
    engine = Engine(wide, parts)
    texts = [list(range(50)) * 6]
    plain = engine.generate(texts, max_new_tokens=40, shape=PLAIN, ignore_eos=True)
    assert engine.generate(texts, max_new_tokens=40, shape=CHAIN, ignore_eos=True).tokens == plain.tokens
    held, (tokens,) = parts.draft.bytes(), parts.draft.tensors()
    assert held == 8192 * 4
    engine.generate([[3] * 900], max_new_tokens=4, shape=CHAIN, ignore_eos=True)
    assert parts.draft.tensors()[0].data_ptr() == tokens.data_ptr()


def test_what_it_refuses(target):
    with pytest.raises(ConfigError, match=r"prompt look-up drafts chains, and shape \[2, 2\]"):
        Engine(target, parts_of(target)).generate([[3, 4]], max_new_tokens=4, shape=TreeShape((2, 2)))
    with pytest.raises(ConfigError, match="no inference keys"):
        SPEC.attach(SPEC.build(Config(), None), target, Config(), {"budget_tokens": 3})
    for ngram in (0, 129):
        with pytest.raises(ConfigError, match=f"method.ngram={ngram}; allowed: a whole number from 1 to 128"):
            Config(ngram=ngram)
