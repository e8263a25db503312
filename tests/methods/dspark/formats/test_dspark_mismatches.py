"""What engines read otherwise without a word is found, though checksums and keys were made to fit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtrain.errors import ArtifactError
from longtrain.methods.dspark.formats import FORMATS
from longtrain.methods.dspark.formats.golden import Blocks

FORMS = ("speculators", "flat")
DFLASH = {"heads": "none", "sample_from_anchor": False}
DFLASH2 = {"heads": "selector", "sample_from_anchor": False, "conv_taps": 2, "selector_top": 9}
REPLAY = "something else|cannot be replayed"


def layer_of(config):
    return config.get("transformer_layer_config", config)


def change(folder, **keys):
    """Change keys wherever they stand; None takes them out."""
    config = folder.config
    for part in (config, layer_of(config), config.get("dflash_config", {})):
        for key, value in keys.items():
            if key in part:
                part[key] = value
                if value is None:
                    del part[key]
    folder.write(config=config)


def verify(folder, target=None):
    return FORMATS.verify(folder.path, target, None)


def refused(folder, said, target=None):
    with pytest.raises(ArtifactError, match=said) as error:
        verify(folder, target)
    assert "\n" not in str(error.value)


@pytest.mark.corners
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("anchor", [True, False])
def test_the_other_layout(export, form, anchor):
    folder = export(form, sample_from_anchor=anchor)[0]
    change(folder, sample_from_anchor=not anchor)
    refused(folder, r"sample_from_anchor=\w+ \(exported: ")
    folder.reseal(keys=True)
    refused(folder, REPLAY)
    change(folder, sample_from_anchor=None, trained_by=None)
    folder.reseal(keys=True)
    refused(folder, "sample_from_anchor is missing: vLLM reads a speculators folder as false")


def test_dflash_has_one_layout(export):
    folder = export("flat", **DFLASH)[0]
    change(folder, sample_from_anchor=True)
    folder.reseal(keys=True)
    refused(folder, "engines read DFlash as fill-in alone")


def test_layer_ids_off_by_one(export):
    folder = export("flat")[0]
    change(folder, eagle_aux_hidden_state_layer_ids=[1, 3])
    folder.reseal(keys=True)
    refused(folder, "they must differ by one; vLLM reads the former, SGLang the latter")
    folder = export("speculators")[0]
    change(folder, aux_hidden_state_layer_ids=[1, 3])
    folder.reseal()
    refused(folder, r"aux_hidden_state_layer_ids=\[1, 3\] .exported: \[2, 4\]")


@pytest.mark.parametrize("fields", [{}, DFLASH])
def test_more_drafted_tokens_than_a_block_has(export, fields):
    """The record leaves `speculators_config` free, for other targets and shorter drafts."""
    folder, _, settings = export("speculators", **fields)
    for tokens in (settings.block_size - 2, settings.block_size + 1):
        config = folder.config
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
        folder.write(config=config)
        if tokens < settings.block_size:
            verify(folder)
    refused(folder, f"speculative_tokens={tokens} in speculators_config.* has {tokens - 1} slots")


def test_full_layers_of_dflash_that_vllm_serves_causal(foreign):
    """Speculators trains full layers over whole blocks, whatever the key of windows says."""
    keys = {"sliding_window_non_causal": False, "transformer_layer_config.is_causal": None}
    path, _ = foreign("speculators", keys, **DFLASH)
    with pytest.raises(ArtifactError, match=r"vLLM lets rows see only rows before them in layers \[0, 1\]"):
        FORMATS.verify(path, None, None)
    path, _ = foreign("speculators", {"sliding_window_non_causal": False}, **DFLASH)
    assert FORMATS.verify(path, None, None), "is_causal=false says it to vLLM"


def test_windows_of_dspark_over_whole_blocks_that_vllm_serves_causal(foreign):
    path, _ = foreign("speculators", {"transformer_layer_config.is_causal": None}, windows=[9, None])
    with pytest.raises(
        ArtifactError,
        match=r"see only rows before them in layers \[0\].*sliding_window_non_causal not at all",
    ):
        FORMATS.verify(path, None, None)


def test_windows_of_dflash_that_vllm_serves_whole(foreign):
    """The key is missing: false to the class, true to vLLM; such a draft is not read either."""
    keys = {"sliding_window_non_causal": None, "transformer_layer_config.is_causal": None}
    path, _ = foreign("speculators", keys, **DFLASH, windows=[9, 9])
    with pytest.raises(
        ArtifactError, match=r"only those before them in some layers.*vLLM lets rows see all rows"
    ):
        FORMATS.verify(path, None, None)


@pytest.mark.parametrize("form", FORMS)
def test_windows(export, form):
    folder = export(form, windows=[9, None])[0]
    assert any("move a window with the slot" in line for line in verify(folder))
    key = layer_of(folder.config)["sliding_window"]
    for other in (key + 1, key - 1):
        change(folder, sliding_window=other)
        refused(folder, rf"sliding_window={other} \(exported: ")
        folder.reseal(keys=True)
        refused(folder, REPLAY)
    change(folder, layer_types=["full_attention", "full_attention"])
    folder.reseal(keys=True)
    refused(folder, REPLAY)


@pytest.mark.parametrize("form", FORMS)
def test_the_mask_token(export, target, form):
    folder = export(form)[0]
    change(folder, mask_token_id=8)
    folder.reseal(keys=True)
    refused(folder, r"the mask token is 8 \(exported: 7\)")
    refused(folder, "the embedding of mask token 8 is not the one", target)
    change(folder, mask_token_id=7)
    folder.reseal(keys=True)
    torch.save({"embedding": torch.zeros(48)}, folder.path / "mask_embedding.pt")
    refused(folder, r"mask_embedding\.pt replaces the mask token's embedding in vLLM's DFlash")


@pytest.mark.parametrize("form", FORMS)
def test_markov_tables(export, form):
    """Rows of the first are by the token before, of the second by the token that is drafted."""
    folder = export(form)[0]
    tensors = folder.tensors
    names = [f"markov_head.markov_w{i}.weight" for i in (1, 2)]
    folder.write(tensors=tensors | dict(zip(names, [tensors[name] for name in names[::-1]], strict=True)))
    folder.reseal()
    refused(folder, "the Markov head or selector adds something else")
    config = folder.config
    folder.write(config={**config, "draft_vocab_size": 40})
    refused(folder, "has no d2t, and its draft knows 40 of 97 tokens")


def test_tables_of_the_selector_and_kernels_exchanged(export):
    """Rows of the first are by the token before; of kernels the first is before the sublayer."""
    folder = export("flat", **DFLASH2)[0]
    tensors = folder.tensors
    names = [f"candidate_selector.{word}_codebook" for word in ("predecessor", "successor")]
    folder.write(tensors=tensors | dict(zip(names, [tensors[name] for name in names[::-1]], strict=True)))
    folder.reseal()
    refused(folder, "the Markov head or selector adds something else")
    kernel = "layers.1.mlp_conv.base_kernel"
    folder.write(tensors=tensors | {kernel: tensors[kernel].flip(0)})
    folder.reseal()
    refused(folder, "the states of a block's slots are something else")


@torch.no_grad()
def test_the_number_of_candidates_is_compared_with_a_target(export, trained_block_draft, target):
    folder = export("flat", **DFLASH2)[0]
    change(folder, selector_top_k=1)
    refused(folder, r"selector_top_k=1 \(exported: 9\)")
    module, config = trained_block_draft(**DFLASH2)
    module.candidate_selector.successor_codebook.mul_(30)
    golden = Blocks.record(module.state_dict(), config, target)
    assert golden.compare(target, 7, config.candidates) == []
    assert "drafted tokens are as then" in golden.compare(target, 7, 1)[0]


def other_words(tensors):
    """A valid map, of which one token is the next one that was not known."""
    ids, known = tensors["d2t"] + torch.arange(40), tensors["t2d"].clone()
    first = next(i for i in range(1, 40) if not known[ids[i] + 1])
    known[ids[first]] = False
    ids[first] += 1
    known[ids[first]] = True
    return {"d2t": ids - torch.arange(40), "t2d": known}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {"lm_head.weight": t["lm_head.weight"] * 1.001}, "logits of the draft's own LM head are"),
        (
            lambda t: {"lm_head.weight": t["lm_head.weight"].roll(1, 0)},
            "drafted tokens are the recorded ones",
        ),
        (other_words, "39 of 40 tokens of the draft's vocabulary are the recorded ones"),
        (lambda t: {"d2t": t["d2t"] + torch.arange(40)}, "d2t is no map of offsets"),
        (lambda t: {"d2t": torch.zeros_like(t["d2t"])}, "t2d does not mark the tokens"),
    ],
    ids=["head", "rows of the head", "one token", "absolute ids", "no offsets"],
)
def test_a_vocabulary_of_the_drafts_own(export, change, said):
    folder = export("speculators", draft_vocab_size=40, objective="lk_hybrid")[0]
    assert verify(folder)
    folder.write(tensors=folder.tensors | change(folder.tensors))
    folder.reseal()
    refused(folder, said)


@pytest.mark.corners
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "becomes", "said"),
    [
        ("layers.1.self_attn.k_norm.weight", None, "missing layers.1.self_attn.k_norm.weight"),
        ("layers.0.self_attn.q_proj.weight", lambda t: t.roll(16, 0), REPLAY),
        ("fc.weight", lambda t: torch.cat(t.chunk(2, 1)[::-1], 1), REPLAY),
        ("fc.weight", lambda t: t / 0, "not finite"),
        ("hidden_norm.weight", torch.ones_like, "as fresh .all ones."),
        ("confidence_head.proj.bias", lambda t: t + 1, "the confidence is something else"),
        ("norm.weight", lambda t: t.to(torch.int32), "norm.weight is int32"),
    ],
    ids=["missing", "heads rolled", "layers swapped", "infinite", "fresh", "confidence", "no float"],
)
def test_tensors(export, form, name, becomes, said):
    folder = export(form)[0]
    tensors = folder.tensors
    if becomes is None:
        del tensors[name]
    else:
        tensors[name] = becomes(tensors[name])
    folder.write(tensors=tensors)
    folder.reseal()
    refused(folder, said)


@pytest.mark.parametrize("form", FORMS)
def test_another_rotary_base(export, form):
    folder = export(form)[0]
    config = folder.config
    layer = layer_of(config)
    layer["rope_parameters"]["rope_theta"] = layer["rope_theta"] = 20000.0
    folder.write(config=config)
    folder.reseal(keys=True)
    refused(folder, REPLAY)
    del layer["rope_parameters"], layer["rope_theta"]
    folder.write(config=config)
    folder.reseal(keys=True)
    if form == "flat":
        refused(folder, "rope_theta is missing: vLLM takes 1000000, SGLang 10000")


@pytest.mark.parametrize(
    ("name", "becomes", "said"),
    [
        ("states_TN", lambda t: t[:-1], "cannot be replayed"),
        ("hidden_AKE", lambda t: t[:, :-1], "something else: shape"),
        ("place_A", None, "lacks place_A"),
    ],
)
def test_damaged_golden_tensors(export, name, becomes, said):
    folder = export("flat")[0]
    path = folder.path / "longtrain" / "golden.safetensors"
    golden = load_file(path)
    part = golden.pop(name)
    save_file(golden if becomes is None else {**golden, name: becomes(part).contiguous()}, path)
    folder.reseal()
    refused(folder, said)
