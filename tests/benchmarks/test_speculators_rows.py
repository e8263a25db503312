"""The states that a row of `speculators` is trained on; its own classes are not installed here."""

import torch
from transformers import AutoConfig, AutoModel

from benchmarks.speculators_rows import states
from longtrain.targets.shapes import SHAPES


def test_states_are_what_enters_a_layer_and_what_enters_the_last_norm():
    target = AutoModel.from_config(AutoConfig.for_model(**SHAPES["llama_micro"])).eval()
    ids = torch.randint(target.config.vocab_size, (1, 12))
    with torch.no_grad():
        hidden = target(ids, output_hidden_states=True).hidden_states
    layers = [1, len(target.layers) - 1]
    before = [len(layer._forward_hooks) for layer in target.layers]
    read, last = states(target, ids, layers)
    assert torch.equal(read, torch.cat([hidden[one] for one in layers], -1))
    assert torch.equal(target.norm(last), hidden[-1])
    assert [len(layer._forward_hooks) for layer in target.layers] == before
