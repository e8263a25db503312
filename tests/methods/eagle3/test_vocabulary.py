"""The draft's vocabulary: what is counted, who wins a tie, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from longtrain.data.packing import prepared
from longtrain.data.packing.prepared import Prepared, PreparedWriter, label_counts
from longtrain.decoding.control import ShapeChoice
from longtrain.decoding.engine import AUTO, GREEDY, Engine
from longtrain.decoding.roles import ChildChoice
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.spec import SPEC
from longtrain.methods.prompt_lookup.joined import with_lookup
from longtrain.methods.vocabulary import check_vocabulary, most_frequent


@pytest.fixture
def data(tmp_path):
    writer = PreparedWriter(tmp_path, 97)
    answer = np.array([0, 0, 0, 1, 1, 1])
    writer.add(np.array([5, 6, 7, 8, 9, 9]), answer, name="a", kind="chat")
    writer.add(np.array([50, 9, 40, 40, 40, 40]), np.ones(6), name="held out", kind="chat", val=True)
    writer.add(np.array([8, 20, 30]), np.ones(3), name="b", kind="chat")
    writer.close({"sources": []})
    return Prepared.open(tmp_path)


@pytest.mark.parametrize("block", [2, 4, 100])
def test_labels_of_documents_that_are_trained_on_are_counted(data, monkeypatch, block):
    monkeypatch.setattr(prepared, "_BLOCK", block)
    counts = label_counts(data, 97)
    assert {int(i): int(counts[i]) for i in counts.nonzero()[0]} == {8: 1, 9: 2, 20: 1, 30: 1}


def test_ties_go_to_smaller_ids_and_unused_ones_fill_up():
    counts = np.array([0, 0, 3, 7, 3, 0, 3])
    assert most_frequent(counts, 3).tolist() == [2, 3, 4]
    assert most_frequent(counts, 6).tolist() == [0, 1, 2, 3, 4, 6]
    assert most_frequent(counts, 3, always=(5,)).tolist() == [2, 3, 5]


def test_a_fresh_draft_takes_it_with_the_targets_rows_of_the_head(data, llama):
    config = Config(draft_vocab_size=4)
    module = SPEC.build(config, llama.info)
    facts = SPEC.from_data(module, config, llama.info, data)["draft_vocabulary"]
    assert module.draft_ids_K.tolist() == [1, 8, 9, 20]  # 1 ends texts
    assert facts["tokens"] == 4 and facts["coverage"] == pytest.approx(4 / 5)
    SPEC.objective(module.double(), llama, config)
    assert torch.equal(module.lm_head.weight, llama.head_weight[module.draft_ids_K])


def test_what_cannot_end_a_text_is_refused(llama, data):
    info = replace(llama.info, eos_ids=(1, 2, 3))
    with pytest.raises(ConfigError, match=r"draft_vocab_size=2; .* at least the 3 tokens that end"):
        SPEC.from_data(SPEC.build(Config(draft_vocab_size=2), info), Config(draft_vocab_size=2), info, data)
    with pytest.raises(TargetMismatchError, match="vocabulary of 3 tokens lacks token 2, which ends texts"):
        check_vocabulary(torch.tensor([1, 3, 5]), info)
    with pytest.raises(TargetMismatchError, match="need ascending, different tokens below 97"):
        check_vocabulary(torch.tensor([1, 3, 2]), info)


def test_a_loaded_draft_keeps_its_weights_and_its_vocabulary_is_checked(llama, caplog):
    config = Config(draft_vocab_size=4)
    other = Eagle3Draft(config, llama.info).double()
    other.draft_ids_K.copy_(torch.tensor([1, 8, 9, 20]))
    module = SPEC.build(config, llama.info).double()
    module.load_state_dict(other.state_dict())
    SPEC.objective(module, llama, config)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in other.state_dict().items())
    module.draft_ids_K.copy_(torch.tensor([0, 8, 9, 20]))
    with pytest.raises(TargetMismatchError, match="lacks token 1"):
        SPEC.objective(module, llama, config)
    caplog.clear()
    SPEC.attach(other, llama, config, {})
    assert not caplog.records
    SPEC.attach(module, llama, config, {})  # it serves, and never drafts the end
    (said,) = [record.getMessage() for record in caplog.records]
    assert "vocabulary of 4 tokens lacks token 1, which ends texts of target" in said


@pytest.mark.parametrize("joined", ["off", "auto"])
def test_offered_shapes_wider_than_the_vocabulary_are_left_out(llama, make_draft, joined):
    """Of 2 tokens a first level has at most 2 nodes; whoever asks for 4 is told so."""
    config = Config(layers=[0, 1], draft_vocab_size=2)
    parts = with_lookup(SPEC.attach(make_draft(llama, config), llama, config, {}), joined)
    engine = Engine(llama, parts)
    plain = Engine(llama).generate([[5, 6, 7, 8] * 4], max_new_tokens=40, ignore_eos=True)
    made = engine.generate([[5, 6, 7, 8] * 4], max_new_tokens=40, ignore_eos=True, shape=AUTO)
    assert made.tokens == plain.tokens
    assert {shape.widths for shape in engine._shapes(AUTO, GREEDY)} == {(), (1, 1), (1,) * 4, (2, 4, 4)}
    with pytest.raises(ConfigError, match=r"level of 4 nodes in shape \[4, .*of 2 tokens allows 2 there"):
        engine.generate([[5, 6]], max_new_tokens=4, shape=ShapeChoice(((1, 1), (4, 8))))


def test_offered_shapes_deeper_than_the_window_are_left_out(llama, make_draft):
    for window, depths in ((5, {0, 2, 3, 4}), (3, {0, 2})):
        config = Config(layers=[0, 1], depths=2, window=window)
        engine = Engine(llama, SPEC.attach(make_draft(llama, config), llama, config, {}))
        assert {shape.depth for shape in engine._shapes(AUTO, GREEDY)} == depths
    with pytest.raises(ConfigError, match="a tree of depth 4 does not fit a window of 3"):
        engine.generate([[5, 6]], max_new_tokens=4, shape=ShapeChoice(((1,) * 4,)))
    with pytest.raises(ConfigError, match="not no_replace"):  # no shape is left, and the reason is told
        engine.generate([[5, 6]], max_new_tokens=4, shape=ShapeChoice(children=ChildChoice.NO_REPLACE))
