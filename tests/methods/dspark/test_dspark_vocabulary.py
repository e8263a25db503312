"""A draft vocabulary of DSpark's own: how it begins, what is refused, and what is decoded with it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from longtrain.data.packing.prepared import Prepared, PreparedWriter
from longtrain.decoding.engine import Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.objective import DSparkObjective
from longtrain.methods.dspark.runtime import DSparkRuntime
from longtrain.methods.dspark.spec import SPEC
from longtrain.methods.prompt_lookup.joined import with_lookup
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from tests.helpers import chi_square
from tests.methods.drafts import texts_of

OWN = Config(
    layers=[0, 2],
    n_layers=2,
    block_size=5,
    markov_rank=6,
    intermediate_size=40,
    draft_vocab_size=4,
    objective="lk_hybrid",
)


@pytest.fixture
def data(tmp_path):
    writer = PreparedWriter(tmp_path, 97)
    writer.add(np.array([5, 6, 9, 8, 9, 9]), np.array([0, 0, 1, 1, 1, 1]), name="a", kind="text")
    writer.add(np.array([8, 20, 30]), np.ones(3), name="b", kind="text")
    writer.close({"sources": []})
    return Prepared.open(tmp_path)


def test_a_new_draft_has_the_most_frequent_labels_and_the_targets_rows_of_the_head(data, llama):
    module = SPEC.build(OWN, llama.info)
    facts = SPEC.from_data(module, OWN, llama.info, data)["draft_vocabulary"]
    assert module.draft_ids_K.tolist() == [1, 8, 9, 20]  # 1 ends texts
    assert facts["tokens"] == 4
    SPEC.objective(module.double(), llama, OWN)
    assert torch.equal(module.lm_head.weight, llama.head_weight[module.draft_ids_K])


def test_a_draft_without_one_takes_nothing_from_the_data(data, llama):
    config = replace(OWN, draft_vocab_size=0)
    module = SPEC.build(config, llama.info)
    assert SPEC.from_data(module, config, llama.info, data) == {}
    assert module.lm_head is None and module.draft_ids_K is None


def test_a_vocabulary_may_be_the_whole_and_the_head_still_learns(llama):
    config = replace(OWN, draft_vocab_size=1000)
    module = SPEC.build(config, llama.info).double()
    SPEC.objective(module, llama, config)
    assert module.draft_ids_K.tolist() == [*range(97)]
    assert torch.equal(module.lm_head.weight, llama.head_weight) and module.lm_head.weight.requires_grad


def test_a_loaded_draft_keeps_its_weights_and_its_vocabulary_is_checked(llama, make_draft, caplog):
    other = make_draft(llama, OWN)
    other.draft_ids_K.copy_(torch.tensor([1, 8, 9, 20]))
    module = SPEC.build(OWN, llama.info).double()
    module.load_state_dict(other.state_dict())
    SPEC.objective(module, llama, OWN)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in other.state_dict().items())
    module.draft_ids_K.copy_(torch.tensor([0, 8, 9, 20]))
    with pytest.raises(TargetMismatchError, match="lacks token 1"):
        SPEC.objective(module, llama, OWN)
    caplog.clear()
    SPEC.attach(other, llama, OWN, {})
    assert not caplog.records
    SPEC.attach(module, llama, OWN, {})  # it serves, and never drafts the end
    (said,) = [record.getMessage() for record in caplog.records]
    assert "vocabulary of 4 tokens lacks token 1, which ends texts of target" in said


def test_refusals(llama, make_draft):
    says = "method.draft_vocab_size=4; allowed: 0 where method.objective=ce_l1, whose cross-entropy"
    with pytest.raises(ConfigError, match=re.escape(says)):
        replace(OWN, objective="ce_l1")
    runtime = DSparkRuntime(make_draft(llama, OWN), llama, OWN)
    runtime.check_shape(TreeShape((4,)))
    with pytest.raises(ConfigError, match=r"level of 5 nodes in shape \[5\]; .*of 4 tokens allows 4"):
        runtime.check_shape(TreeShape((5,)))
    # without a Markov head no matrix has the size of the target's vocabulary
    config = replace(OWN, heads="none", sample_from_anchor=False)
    draft = make_draft(llama, config)
    draft.draft_ids_K.copy_(torch.tensor([1, 8, 9, 60]))
    few = {**SHAPES["llama_micro"], "num_hidden_layers": 4, "vocab_size": 60}
    with pytest.raises(TargetMismatchError, match=r"reaches token 60; target .* has 60 tokens"):
        SPEC.attach(draft, random_target(few, dtype=torch.float64), config, {})


def test_a_head_that_is_being_trained_is_read_anew_by_each_text(llama, make_draft):
    draft = make_draft(llama, OWN)
    runtime = SPEC.attach(draft, llama, OWN, {}).draft
    with torch.no_grad():
        draft.lm_head.weight.mul_(2)
    runtime.fused.renew()
    assert draft.lm_head.weight.requires_grad
    assert torch.equal(runtime.fused.head.weight, draft.lm_head.weight)


@pytest.mark.parametrize("chunk", [0, 8])
def test_a_batch_without_blocks_leaves_every_weight_a_gradient_of_zero_or_none(
    chunk, llama, make_draft, make_batch
):
    config = replace(OWN, chunk_tokens=chunk)
    draft = make_draft(llama, config)
    loss = DSparkObjective(draft, llama, config)(
        make_batch(llama, [9, 9], mask=lambda n: torch.arange(n) == 4)
    )
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and loss.tokens == 1
    assert not any(p.grad is not None and bool(p.grad.any()) for p in draft.parameters())


@pytest.mark.parametrize("least", [0.0, 0.4])
def test_greedy_texts_are_the_targets_own(least, llama, make_draft):
    """Cut by the confidence, and with copies of tokens that the draft cannot propose."""
    draft = make_draft(llama, OWN)
    parts = SPEC.attach(draft, llama, OWN, {"min_confidence": least} if least else {})
    prompts = [[*text, *text] for text in texts_of(14, 9)]
    how = {"max_new_tokens": 24, "ignore_eos": True}
    plain = Engine(llama).generate(prompts, **how).tokens
    for shape in (TreeShape((1, 1, 1)), TreeShape((3, 4))):
        assert Engine(llama, parts).generate(prompts, shape=shape, **how).tokens == plain
        if not least:
            joined = Engine(llama, with_lookup(parts, "auto"))
            assert joined.generate(prompts, shape=shape, **how).tokens == plain


def test_sampled_texts_that_are_cut_follow_the_targets_distribution(make_draft):
    shape = {**SHAPES["llama_micro"], "num_hidden_layers": 4, "vocab_size": 7}
    target = random_target(shape, seed=3, dtype=torch.float64)
    draft = make_draft(target, OWN)
    with torch.no_grad():  # so that it varies from token to token around a half
        draft.confidence_head.proj.weight.mul_(0.3)
        draft.confidence_head.proj.bias.fill_(0.8)
    engine = Engine(
        target, SPEC.attach(draft, target, OWN, {"min_confidence": 0.4}), limits=Limits(batch=500)
    )
    tree, sampling = TreeShape((1, 1, 1), ChildChoice.IID), Sampling(temperature=1.3, seed=1)
    chi2, _ = chi_square(engine, [token % 7 for token in texts_of(20)[0]], tree, sampling, tokens=4, runs=500)
    assert chi2 < 42.3  # 99.9% at 18 degrees of freedom
