"""What `plan` says of DSpark: the published draft's weights, and tensors that are there."""

from __future__ import annotations

from dataclasses import replace

import torch

from longtrain.costs.model import Sizes
from longtrain.costs.training import PackedSequence
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.cost import cycle, draft_weights, training
from longtrain.methods.dspark.objective import DSparkObjective
from longtrain.methods.dspark.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES

QWEN = Sizes.of_keys(SHAPES["qwen3_8b"])


def cost(tokens, **keys):
    return training(Config(**keys), QWEN, PackedSequence(tokens, tokens), 1_130_000_000, 2)


def test_the_published_drafts_weights():
    """Qwen3 8B: fc 83.9 M, a layer 41.9 M for its attention and 151 M for its MLP, the Markov head 77.8 M."""
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
    shape = SHAPES["qwen3_8b"]
    info = replace(
        random_target("qwen3_micro").info,
        **dict(
            zip(
                ("n_layers", "n_heads", "n_kv_heads", "hidden_size", "vocab_size"),
                (shape[key] for key in keys),
                strict=True,
            )
        ),
        head_dim=128,
        intermediate_size=shape["intermediate_size"],
    )
    with torch.device("meta"):
        module = SPEC.build(Config(), info)
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.ndim == 2}
    layer, fc, embedding, markov, head, _ = draft_weights(Config(), QWEN)
    assert fc == sizes["fc.weight"] == 5 * 4096**2 and round((embedding + markov) / 1e6, 1) == 77.8
    assert not head
    assert layer == sum(n for name, n in sizes.items() if name.startswith("layers.3."))
    assert round(layer / 1e6) == 42 + 151
    assert round(sum(p.numel() for p in module.parameters()) / 1e9, 2) == 1.13


def test_the_weights_of_dflash2(llama, make_draft):
    config = Config(layers=[0, 2], n_layers=2, markov_rank=4, heads="selector", conv_taps=2, conv_group=8)
    sizes = {name: p.numel() for name, p in make_draft(llama, config).named_parameters() if p.ndim == 2}
    found, size = draft_weights(config, Sizes.of(llama.info)), Sizes.of(llama.info)
    assert found.layer == sum(n for name, n in sizes.items() if name.startswith("layers.1."))
    assert found.embedding == sum(n for name, n in sizes.items() if "codebook" in name) == 2 * 97 * 4
    assert found.markov == sizes["candidate_selector.hidden_projection.weight"] == 4 * 48
    assert found.learned == sizes["candidate_selector.successor_codebook"]
    plain = replace(config, heads="none", conv_taps=0, conv_group=16)
    more, less = (training(one, size, PackedSequence(640, 640), 0, 2) for one in (config, plain))
    kernels = 4 * (2 * 2 * 48 // 8)
    rows = 640 * 7 // 8
    assert more.flops - less.flops == 6 * 2 * (2 * 48 * kernels // 4) * rows + 6 * 4 * 48 * rows
    assert more.module > less.module
    long, short = (cycle(one, size, (1,) * 5, 2) for one in (config, plain))
    assert long.draft[0].more_weights - short.draft[0].more_weights == 2 * 2 * 48 * kernels // 4 + 5 * 4 * 48
    assert long.weight_bytes - short.weight_bytes == 2 * (2 * 2 * 48 * kernels // 4 + 4 * 48 + 2 * 97 * 4)


PART = Config(draft_vocab_size=32000, objective="lk_hybrid")


def test_a_vocabulary_of_the_drafts_own_has_its_weights(llama, make_draft):
    config = Config(layers=[0, 2], n_layers=2, markov_rank=4, draft_vocab_size=40, objective="lk_hybrid")
    sizes = {name: p.numel() for name, p in make_draft(llama, config).named_parameters()}
    found = draft_weights(config, Sizes.of(llama.info))
    assert found.head == sizes["lm_head.weight"] == 40 * llama.info.hidden_size
    assert found.embedding == sizes["markov_head.markov_w1.weight"] == 97 * 4
    assert found.markov == sizes["markov_head.markov_w2.weight"] == 40 * 4
    more = replace(config, draft_vocab_size=1000)
    assert draft_weights(more, Sizes.of(llama.info)).head == 97 * llama.info.hidden_size


def test_a_step_with_a_vocabulary_of_the_drafts_own():
    """The target's logits are over its whole vocabulary, the draft's over its own, whose head is trained."""
    row, (V, K, E, F) = PackedSequence(16384, 16384), (QWEN.vocab_size, 32000, 4096, 256)
    whole, part = (training(one, QWEN, row, 0, 2) for one in (Config(objective="lk_hybrid"), PART))
    slots = 16384 * 7 // 8
    assert whole.flops - part.flops == ((4 * (V - K) - 2 * K) * E + 6 * F * (V - K)) * slots
    assert part.moved < whole.moved


def test_the_targets_logits_are_computed_once_a_token():
    """Twice as many blocks, with twice as many rows and slots, predict the same tokens."""
    row, (K, E, F) = PackedSequence(16384, 16384), (32000, 4096, 256)
    often, seldom = (training(replace(PART, anchor_every=n), QWEN, row, 0, 2) for n in (1, 2))
    more = (often.flops - often.attention_flops) - (seldom.flops - seldom.attention_flops)
    layers = 5 * draft_weights(PART, QWEN).layer
    assert more == 6 * (layers + K * E + F * K) * 16384 * 7 // 2


def test_a_cycle_with_a_vocabulary_of_the_drafts_own():
    whole, part = (cycle(config, QWEN, (1,) * 7, 2) for config in (Config(), PART))
    V, K, E, F = QWEN.vocab_size, 32000, 4096, 256
    assert whole.draft[0].more_weights - part.draft[0].more_weights == (V - K) * (E + 7 * F)
    assert part.weight_bytes - whole.weight_bytes == 2 * (K * E - (V - K) * F)


def test_inputs_are_the_states_that_are_read(llama, make_draft, make_batch):
    config = Config(layers=[0, 2], n_layers=2, markov_rank=4)
    objective = DSparkObjective(make_draft(llama, config), llama, config)
    hidden = objective._read(make_batch(llama, [40])).hidden
    step = training(config, Sizes.of(llama.info), PackedSequence(40, 40), 1000, 8)
    assert step.hidden == 3 * llama.info.hidden_size
    assert step.inputs == sum(x.nbytes for x in hidden.values()) + 40 * 8


def test_a_layer_that_reads_the_targets_keys_stores_none(llama, make_draft, make_batch):
    config = Config(layers=[0, 2], n_layers=2, windows=[16, None], target_kv=True, markov_rank=4)
    objective = DSparkObjective(make_draft(llama, config), llama, config)
    row = objective._read(make_batch(llama, [40]))
    size = Sizes.of(llama.info)
    step = training(config, size, PackedSequence(40, 40), 1000, 8)
    # the objective keeps those before the last block alone
    kv = sum(x.nbytes for x in row.target_kv[0]) // (row.high - row.low) * 40
    assert step.inputs == sum(x.nbytes for x in row.hidden.values()) + kv + 40 * 8
    assert step.kv == kv // 40 // 8
    keys = {"n_layers": 2, "windows": [2048, None]}
    assert cost(131072, **keys, target_kv=True).module < cost(131072, **keys).module
    held = [cycle(Config(**keys, target_kv=True), QWEN, (1,), 2).cache_bytes(1, n) for n in (4096, 131072)]
    # the target's own alone
    assert held[1] - held[0] == QWEN.kv_bytes(131072 - 4096)


def test_a_chunked_step_grows_by_keys_and_values_alone():
    short, long = cost(16384), cost(131072)
    kv = 5 * 2 * 1024 * (131072 - 16384)
    # in 16 bits twice, summed up in fp32, and one layer of five in fp32 once more
    assert long.module - short.module == kv * (2 * 2 + 4) + kv // 5 * 4
    assert cost(131072, chunk_tokens=0).module > 3 * long.module
    windows = cost(131072, windows=[2048] * 4 + [None])
    assert windows.attention_flops < 0.3 * long.attention_flops
    assert cost(131072, anchor_every=1).flops > 4 * long.flops


def test_a_cycle_reads_its_layers_once_for_a_block():
    one, whole = (cycle(Config(), QWEN, (1,) * length, 2) for length in (1, 7))
    assert len(one.draft) == len(whole.draft) == 1 and one.draft[0].rows == 7
    markov = draft_weights(Config(), QWEN).markov
    assert whole.draft[0].more_weights - one.draft[0].more_weights == 6 * markov
    assert one.draft[0].seen is None
    assert cycle(Config(windows=[64] * 4 + [99]), QWEN, (1,), 2).draft[0].seen == 99
    target_alone = QWEN.kv_bytes(1000) * 2 / 2
    assert one.cache_bytes(1, 1000) - target_alone == 1000 * 20480  # 20 KB a token
