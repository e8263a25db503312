import math

import pytest
import torch

from longtrain.data.packing.batch import Batch
from longtrain.methods.spec import Loss
from longtrain.training.callbacks import short
from longtrain.training.loop import title_of
from longtrain.training.pooling import Pool


def batch(name):
    return Batch(
        torch.zeros(7, dtype=torch.long), (0, 3, 7), torch.ones(7, dtype=torch.bool), 0, 1, (name, name + "2")
    )


def loss(total, tokens, right):
    return Loss(torch.tensor(total), tokens, {"acc": (torch.tensor(right), torch.tensor(float(tokens)))})


def test_micro_batches_are_pooled_by_count_not_averaged():
    pool = Pool()
    pool.add(loss(10.0, 2, 2.0), batch("a"))
    pool.add(loss(1.0, 8, 0.0), batch("b"))
    pool.close(1, {"lr": 0.5, "grad_norm": torch.tensor(3.0)})
    pool.add(loss(4.0, 4, 1.0), batch("c"))
    pool.close(2)
    first, second = pool.read(lambda mine: [mine])
    assert first.metrics == {"loss": 1.1, "acc": 0.2, "lr": 0.5, "grad_norm": 3.0}
    assert (first.step, first.tokens, first.documents, first.rows, first.sequence_tokens) == (1, 10, 4, 2, 14)
    assert second.metrics == {"loss": 1.0, "acc": 0.25}
    assert pool.read(lambda mine: [mine]) == []


def test_ranks_are_pooled_even_when_their_figures_differ():
    ranks = []
    for total, extra in ((3.0, {}), (5.0, {"only_here": (torch.tensor(2.0), torch.tensor(4.0))})):
        pool = Pool()
        pool.add(Loss(torch.tensor(total), 2, extra), batch("a"))
        pool.close(1)
        pool.read(lambda mine: ranks.append(mine) or [mine])
    pool.add(Loss(torch.tensor(5.0), 2), batch("a"))
    pool.close(1)
    (record,) = pool.read(lambda mine: ranks)
    assert record.metrics == {"loss": 2.0, "only_here": 0.5} and record.rows == 2


def test_a_bad_micro_batch_names_its_documents_only():
    pool = Pool()
    pool.add(loss(1.0, 1, 0.0), batch("good"))
    pool.add(loss(float("nan"), 1, 0.0), batch("bad"))
    pool.close(7)
    (record,) = pool.read(lambda mine: [mine])
    assert record.offending == ("bad", "bad2") and math.isnan(record.metrics["loss"])


def test_a_figure_without_counts_is_nan():
    pool = Pool()
    pool.add(loss(0.0, 0, 0.0), batch("a"))
    pool.close(1)
    (record,) = pool.read(lambda mine: [mine])
    assert math.isnan(record.metrics["acc"])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("head_1", "head_2"), "head 0.500,0.500"),  # no "d_1" of a family "hea"
        (("acc/depth_0", "acc/depth_1"), "acc 0.500,0.500"),
        (("recall@d4", "acc_1", "fold7"), "recall 0.500 acc 0.500 fold 0.500"),
    ],
)
def test_figures_of_a_family_stand_together_under_its_whole_name(names: tuple[str, ...], said: str) -> None:
    assert short({f"train/{name}": 0.5 for name in names}) == said


def test_the_picture_of_a_training_says_what_for_whom_and_how_long() -> None:
    stages = [{"doc_tokens": 640, "sequence_tokens": 1280}, {"doc_tokens": 2048}]
    facts = {"method.name": "longspec", "target.name": "/models/tiny", "data.stages": stages}
    assert title_of(facts) == "training of longspec for tiny on texts of up to 2k tokens"
    assert title_of({"method.name": "pretrain"}) == "training of pretrain"
