"""Rounding and faults told apart on a trained target in bf16, whose logits move by more than most gaps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.assets import asset_dir
from longtrain.cache.dense import DenseCache
from longtrain.decoding import decode_step
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import Parts, TokenTree, TreeShape
from longtrain.decoding.tree import chain, depths
from longtrain.errors import LongtrainError
from longtrain.evaluation.harness import lossless, rounding
from longtrain.evaluation.harness.lossless import enforce
from longtrain.evaluation.harness.rounding import Passage, change, logits_at_once, noise_of, spacing
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Task
from longtrain.systems import FULL_CACHE, System
from longtrain.systems.system import ARTIFACT
from longtrain.targets.loading import load_target
from longtrain.targets.step import OutputRequest

from .test_lossless import change as edit_record

SCALE = 8.0
"""Multiplies the logits: as if the weights made large ones."""
TEXTS, PROMPT, NEW = 3, 60, 20
CHAIN, TREE = TreeShape((1, 1, 1)), TreeShape((3, 2))


class Predicted:
    """A draft that knows what plain decoding writes, and drafts it behind tokens that are wrong.

    Args:
        texts: prompt -> text.
        wrong_at: drafts a wrong token there; None: nowhere.
    """

    outputs = OutputRequest()

    def __init__(self, texts, wrong_at=None):
        self.texts, self.wrong_at = texts, wrong_at

    def start(self, tokens_BS, n_B, step, cache):
        self.cache, self.n_B = cache, n_B
        self.own = [self.texts[tuple(row[:n].tolist())] for row, n in zip(tokens_BS, n_B, strict=True)]

    def propose(self, root_B, shape, sampling, rng):
        ids = torch.tensor([self._nodes(*one, shape) for one in zip(self.own, self._done(), strict=True)])
        ids[:, 0] = root_B
        if set(shape.widths) == {1}:
            return chain(ids)
        last, parents = 0, [-1]
        for width in shape.widths:
            parents += [last] * width
            last += width
        return TokenTree(ids, torch.tensor(parents).expand_as(ids), depths(shape))

    def _done(self):
        return (self.cache.len_B - self.n_B).tolist()

    def _nodes(self, text, done, shape):
        nodes = [0]
        for level, width in enumerate(shape.widths):
            at = done + 1 + level
            real = text[at] if at < len(text) else 0
            real = real + 1 if at == self.wrong_at else real
            nodes += [(real + 7 + other) % 4096 for other in range(width - 1)] + [real]
        return nodes

    def observe(self, tree, verdict, step):
        pass

    def bytes(self):
        return 0

    def tensors(self):
        return None


@pytest.fixture(scope="module")
def noisy():
    target = load_target("tiny", dtype="bfloat16", device="cpu")
    target.final_norm_weight.data.mul_(SCALE)
    return target


@pytest.fixture(scope="module")
def prompts(noisy):
    book = sorted((asset_dir("bundled") / "text" / "heldout").iterdir())[0]
    ids = noisy.tokenizer(book.read_text()[20_000:40_000]).input_ids
    return [ids[at : at + PROMPT] for at in range(0, TEXTS * 400, 400)]


@pytest.fixture(scope="module")
def plain(noisy, prompts):
    return Engine(noisy).generate(prompts, max_new_tokens=NEW, ignore_eos=True).tokens


@pytest.fixture
def run(session, noisy, prompts, plain):
    """`run(shape, wrong_at)`: a finished session, and the same again for another look at its records."""

    def made(shape=CHAIN, wrong_at=None, **others):
        rows = tuple(Example(f"copy-{i}", {"text": str(i)}) for i in range(TEXTS))
        task = Task(
            "copy", rows, "{text}", NEW, "none", lambda text, example: 0.0, chat=False, ignore_eos=True,
            written=lambda one: Encoded(tuple(prompts[int(one.fields["text"])]), False),
        )  # fmt: skip
        texts = {tuple(prompt): text for prompt, text in zip(prompts, plain, strict=True)}
        drafts = [
            System(name, ARTIFACT, name, None, Parts(Predicted(texts, wrong_at)), its_shape, {}, "full")
            for name, its_shape in {"draft": shape, **others}.items()
        ]
        return session(
            asked=Suite("toy", (task,)), entries=(), target=noisy, systems=[FULL_CACHE, *drafts], batch=TEXTS
        )

    return made


def exactness(made):
    found = made.finish().results
    return found, found["systems"][1]["tasks"][0]["exactness"]


def test_a_close_call_that_went_the_other_way_is_rounding(run, noisy, prompts, plain):
    """The text goes on with the second best token where the two best are nearest, and on from there."""
    closest = []
    for row, (prompt, text) in enumerate(zip(prompts, plain, strict=True)):
        best_T2 = logits_at_once(noisy, Parts(), Passage(prompt, text)).topk(2)
        gap_T = best_T2.values[:, 0] - best_T2.values[:, 1]
        gap_T[0] = torch.inf
        at = int(gap_T.argmin())
        (other,) = set(best_T2.indices[at].tolist()) - {text[at]}
        closest.append((float(gap_T[at]), row, at, other))
    gap, row, at, other = min(closest)
    head = [*plain[row][:at], other]
    rest = Engine(noisy).generate([[*prompts[row], *head]], max_new_tokens=NEW, ignore_eos=True).tokens[0]

    def went_on(turn):
        turn["tokens"] = [*head, *rest][:NEW]

    made = run()
    made.work()
    edit_record(made, "draft", went_on, f"copy-{row}")
    found, exact = exactness(replace(made))
    first = next(one for one in exact["first"] if one["example"] == f"copy-{row}")
    assert first["position"] == at and first["gap"] >= gap
    assert exact["noise"]["largest"] > 0.5, "gaps of 0.02 to 1 say nothing about such a target"
    assert exact["different"] >= 1 and exact["violations"] == exact["wrong"] == 0
    enforce(found)


def _off_by_one(patch):
    """Drafted nodes stand one position too far on."""
    real = decode_step.positions
    patch.setattr(decode_step, "positions", lambda tree, root_B: real(tree, root_B) + (tree.depth_N > 0))


def _siblings_seen(patch):
    """Nodes see everything before them, siblings too."""
    patch.setattr(
        decode_step, "visible", lambda parents: torch.ones(*parents.shape, parents.shape[1]).tril() > 0
    )


def _stale_entry(patch):
    """The last KV entry of a path is that of the token before it."""
    real = DenseCache.commit

    def commit(self, path_BP, n_B):
        before_B = self.len_B
        real(self, path_BP, n_B)
        for row, (first, count) in enumerate(zip(before_B.tolist(), n_B.tolist(), strict=True)):
            at = first + count - 1
            for buffer in (self.k_LBGSD, self.v_LBGSD) if count > 1 else ():
                buffer[:, row, :, at] = buffer[:, row, :, at - 1]

    patch.setattr(DenseCache, "commit", commit)


def _first_child_accepted(patch):
    """The first drafted token of the third cycle is accepted whatever it is."""
    real, seen = decode_step.verify, []

    def verify(tree, logits_BNV, *rest, **options):
        if tree.tokens_BN.shape[1] > 1:
            seen.append(tree)
            if len(seen) == 3:
                logits_BNV = logits_BNV.clone()
                logits_BNV[range(TEXTS), 0, tree.tokens_BN[:, 1]] = 1e4
        return real(tree, logits_BNV, *rest, **options)

    patch.setattr(decode_step, "verify", verify)


@pytest.mark.parametrize(
    ("fault", "shape", "wrong_at"),
    [
        (_off_by_one, CHAIN, None),
        (_siblings_seen, TREE, None),
        pytest.param(_stale_entry, CHAIN, None, marks=pytest.mark.slow),
        (_first_child_accepted, CHAIN, 9),
    ],
)
def test_planted_faults_are_beyond_rounding_on_a_target_that_rounds_coarsely(
    run, monkeypatch, fault, shape, wrong_at
):
    made = run(shape, wrong_at)
    with monkeypatch.context() as patch:
        fault(patch)
        made.work()
    found, exact = exactness(made)
    assert exact["noise"]["largest"] > 0.5
    assert exact["wrong"] >= 1 and exact["violations"] >= 1
    with pytest.raises(LongtrainError, match="beyond rounding"):
        enforce(found)


def test_a_fault_of_one_way_of_reading_is_not_noise(noisy, prompts, plain, monkeypatch):
    """Steps of one token, or of several, that are wrong do not widen what passes for rounding."""
    passage = Passage(prompts[0], plain[0][:12])
    at_once = logits_at_once(noisy, Parts(), passage)
    sound = noise_of(noisy, Parts(), passage, at_once, rows=4)
    real = rounding.each_step
    for faulty in (1, 4):

        def steps(*args, rows, wrong=faulty):
            for some_TV in real(*args, rows=rows):
                yield some_TV.flip(1) if rows == wrong else some_TV

        monkeypatch.setattr(rounding, "each_step", steps)
        assert noise_of(noisy, Parts(), passage, at_once, rows=4) < 2 * sound + 1


@pytest.mark.slow
def test_what_is_not_read_again_changes_no_verdict(run, monkeypatch):
    """Texts that several drafts share, and noise that others exceed, against reading everything."""
    made = run(again=CHAIN, tree=TREE)
    made.work()
    for name in ("draft", "again", "tree"):
        for row in range(TEXTS):

            def edit(turn, at=6 * row + 2, token=11 + (name == "tree") * (row == 1)):
                turn["tokens"][at] = token

            edit_record(made, name, edit, f"copy-{row}")
    read = []
    once, steps = rounding.logits_at_once, rounding.each_step

    def counted(*args, **options):
        for some_TV in steps(*args, **options):
            read.append(len(some_TV))
            yield some_TV

    def judged():
        read.clear()
        found = replace(made).finish().results
        return [one["tasks"][0]["exactness"] for one in found["systems"][1:]], len(read)

    def at_once(*args):
        read.append(0)
        return once(*args)

    def all_noise(target, parts, passage, at_once_TV, *, rows, above):
        return min(
            change(at_once_TV, rounding.logits_in_steps(target, parts, passage, rows=n))
            for n in (1, max(rows, 2))
        )

    monkeypatch.setattr(lossless, "logits_at_once", at_once)
    monkeypatch.setattr(rounding, "each_step", counted)
    little, n_little = judged()
    monkeypatch.setattr(lossless, "noise_of", all_noise)
    monkeypatch.setattr(lossless._Known, "serves", lambda *_: False)
    everything, n_everything = judged()
    assert little == everything and all(one["noise"]["texts"] == TEXTS for one in little)
    assert n_little < n_everything / 2, (n_little, n_everything)


def test_a_change_is_that_of_distances_from_the_best_logit():
    one = torch.tensor([[9.0, 7.0, 5.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    other = one + torch.tensor([[10.0], [-3.0]])
    assert change(one, other) == 0.0
    other[1, 3] -= 0.5
    other[0, 4] += 100.0  # not among the best
    assert change(one, other) == 0.5
    assert spacing(33.0, torch.bfloat16) == 0.25 and spacing(1.0, torch.float32) == 2.0**-23
