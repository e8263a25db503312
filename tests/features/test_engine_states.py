"""Files of an engine: what is read from them, and what is refused in a line before a step is taken."""

from __future__ import annotations

import fcntl
import re

import pytest
import torch
from engine_files import states_of, write_states
from helpers import token_ids
from safetensors.torch import load_file, save_file

from longtrain.errors import ConfigError, DataError, TargetMismatchError
from longtrain.features.engine import EngineStates
from longtrain.features.settings import FeatureSettings
from longtrain.features.target import in_words, row_key
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest

ROWS = token_ids(20, 48, 33)
ASK = OutputRequest("none", hidden=(0, 2, -1))
IDS = (1, 3, 4)
"""vLLM's ids of those: the outputs of layers 0 and 2 of 4, and of the last."""


@pytest.fixture(scope="module")
def deep():
    return random_target({**SHAPES["llama_micro"], "num_hidden_layers": 4}, seed=1)


def read(folder, target, ids, layer_ids=None, ask=ASK):
    """A document's features by name."""
    states = EngineStates(folder, target, layer_ids)
    states.expect(ask)
    return states.read(row_key(torch.tensor(ids), in_words(ask)), "it")


@pytest.mark.parametrize("name", ["cmpl-{}-0", "hs_{}", "of/users/{}"])
def test_what_the_target_gives_is_read_bit_for_bit(tmp_path, deep, name):
    (tmp_path / "of/users").mkdir(parents=True)
    write_states(tmp_path, deep, ROWS, IDS, name=name)
    states = EngineStates(tmp_path, deep)
    states.expect(ASK)
    assert len(states) == 3 and states.tokens() == sum(map(len, ROWS)) and states.size_bytes() > 0
    for ids in ROWS:
        truth = deep.packed(torch.tensor(ids), torch.arange(len(ids)), (0, len(ids)), ASK).hidden
        found = read(tmp_path, deep, ids)
        assert {*found} == {"hidden.0", "hidden.2", "hidden.-1"}
        for layer, state in truth.items():
            assert torch.equal(found[f"hidden.{layer}"], state)


def test_more_layers_than_are_read_need_their_ids_in_any_order(tmp_path, deep):
    write_states(tmp_path, deep, ROWS, (3, 0, 4, 1))
    few, many = read(tmp_path, deep, ROWS[1], (4, 0, 3, 1)), states_of(deep, ROWS[1], (0, 1, 3, 4))
    assert torch.equal(few["hidden.0"], many[:, 1]) and torch.equal(few["hidden.2"], many[:, 2])
    last = OutputRequest("none", hidden=(3, -1))  # the last layer before and after the norm
    again = read(tmp_path, deep, ROWS[1], (4, 0, 3, 1), ask=last)
    assert torch.equal(again["hidden.3"], many[:, 3])
    assert torch.equal(deep.final_norm(again["hidden.3"]), again["hidden.-1"])


def test_fp8_states_with_scales_are_read(tmp_path, deep):
    (file,) = write_states(tmp_path, deep, ROWS[:1], IDS)
    whole = load_file(file)
    scale = whole["hidden_states"].abs().amax((1, 2), keepdim=True) / 448
    coded = (whole["hidden_states"] / scale).to(torch.float8_e4m3fn)
    save_file({**whole, "hidden_states": coded, "hidden_states_scales": scale}, file)
    found = read(tmp_path, deep, ROWS[0])["hidden.2"].float()
    torch.testing.assert_close(
        found, whole["hidden_states"][:, 1], rtol=2**-4 + 2**-8, atol=float(scale.max()) / 256
    )


def test_the_longest_document_that_is_needed_is_an_example(tmp_path, deep):
    write_states(tmp_path, deep, ROWS, IDS)
    for asked, length in ((30, 30), (48, 48), (90, 48)):
        ids_T, told = EngineStates(tmp_path, deep).example(OutputRequest(hidden=(0, 2)), asked)
        whole = next(ids for ids in ROWS if ids[:length] == ids_T.tolist())
        found = read(tmp_path, deep, whole)
        assert len(ids_T) == length and {*told} == {"hidden_0", "hidden_2", "hidden_-1"}
        for name, state in told.items():
            assert torch.equal(state, found[name.replace("_", ".")][:length])


def changed(file, **values):
    """Write a file again with other values; None leaves one out."""
    tensors = {**load_file(file), **values}
    save_file({name: one.contiguous() for name, one in tensors.items() if one is not None}, file)


N = len(ROWS[0])
FORMS = {
    "no states": ({"hidden_states": None}, DataError, "has token_ids, not token_ids and hidden_states"),
    "no ids": ({"token_ids": None}, DataError, "has hidden_states, not token_ids and hidden_states"),
    "no tokens": (
        {"token_ids": torch.zeros(0, dtype=torch.long), "hidden_states": torch.zeros(0, 3, 48)},
        DataError,
        r"has no tokens \(an aborted request, or one of embeddings\)",
    ),
    "length": (
        {"token_ids": torch.arange(N - 1)},
        DataError,
        r"has hidden_states \[20, 3, 48\], .* \[\[19\]\]; expect",
    ),
    "flat": ({"hidden_states": torch.zeros(N, 144)}, DataError, r"has hidden_states \[20, 144\]"),
    "mask length": ({"loss_mask": torch.ones(N + 1)}, DataError, r"\[\[20\], \[21\]\]; expected"),
    "type": (
        {"hidden_states": torch.ones(N, 3, 48, dtype=torch.int8)},
        DataError,
        "has states of type I8 without hidden_states_scales; allowed: F32, F16, BF16, or F8_E4M3 with",
    ),
    "fp8": (
        {"hidden_states": torch.ones(N, 3, 48).to(torch.float8_e4m3fn)},
        DataError,
        "of type F8_E4M3 without hidden_states_scales",
    ),
    "scales": (
        {
            "hidden_states": torch.ones(N, 3, 48).to(torch.float8_e4m3fn),
            "hidden_states_scales": torch.ones(3),
        },
        DataError,
        r"hidden_states_scales \[3\]; expected integers and, of fp8, \[T, 1, 1\]",
    ),
    "scales of no fp8": (
        {"hidden_states_scales": torch.ones(N, 1, 1)},
        DataError,
        "has states of type F32 with hidden_states_scales; allowed: .*, or F8_E4M3 with hidden_states_scales",
    ),
    "booleans": ({"token_ids": torch.ones(N, dtype=torch.bool)}, DataError, "has token_ids of type torch.bo"),
    "mask of NaN": (
        {"loss_mask": torch.ones(N).index_fill(0, torch.tensor([3, 5]), torch.nan)},
        DataError,
        "has a loss_mask of NaN or infinite values, 2 of 20; expected 1 for a label and 0 for none",
    ),
    "fractions": ({"token_ids": torch.arange(N) + 0.5}, DataError, "has token_ids of type torch.float32"),
    "no last": (
        {"hidden_states": torch.ones(N, 2, 48)},
        DataError,
        r"holds 2 layers, and 3 are expected: \[1, 3, 4\] \(perhaps the last, 4, is missing\); pass fea",
    ),
    "more": (
        {"hidden_states": torch.ones(N, 4, 48)},
        DataError,
        r"holds 4 layers, and 3 are expected: \[1, 3, 4\];",
    ),
    "size": (
        {"hidden_states": torch.ones(N, 3, 40)},
        TargetMismatchError,
        "hidden states of size 40, and target .* 48",
    ),
    "vocabulary": ({"token_ids": torch.arange(N) + 90}, DataError, "outside the vocabulary of 97"),
}


@pytest.mark.parametrize("case", FORMS)
def test_a_file_of_another_form_is_refused(tmp_path, deep, case):
    values, kind, message = FORMS[case]
    changed(write_states(tmp_path, deep, ROWS, IDS)[0], **values)
    with pytest.raises(kind, match=message) as error:
        EngineStates(tmp_path, deep).expect(ASK)
    assert "\n" not in str(error.value) and "cmpl-0-0.safetensors" in str(error.value)


def test_a_torn_or_unfinished_file_is_refused(tmp_path, deep):
    file = write_states(tmp_path, deep, ROWS, IDS)[0]
    with (tmp_path / f"{file.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="is still being written by the engine; wait"):
            EngineStates(tmp_path, deep).expect(ASK)
    EngineStates(tmp_path, deep).expect(ASK)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        DataError, match=r"is damaged or torn .*; delete it, and have the engine write it again"
    ) as error:
        EngineStates(tmp_path, deep).expect(ASK)
    assert "\n" not in str(error.value)


def test_values_that_cannot_be_are_refused(tmp_path, deep):
    first, second, third = write_states(tmp_path, deep, ROWS, IDS)
    for value, at, file, ids in (
        (torch.nan, 3, first, ROWS[0]),
        (torch.inf, 3, second, ROWS[1]),
        (0.0, slice(None), first, ROWS[0]),  # slots of another block size: vLLM's pull request 51328
    ):
        write_states(tmp_path, deep, ROWS, IDS)
        states = load_file(file)["hidden_states"]
        states[5:7, 1, at] = value
        changed(file, hidden_states=states)
        with pytest.raises(
            DataError, match=r"has NaN, infinite or all-zero states at 2 of .* tokens, the first at token 5"
        ):
            read(tmp_path, deep, ids)
    states = load_file(third)["hidden_states"]
    changed(third, hidden_states=torch.cat([states[:, :2], deep.final_norm(states[:, 2:])], 1))
    with pytest.raises(
        DataError, match="last layer's states after the final norm; expected those before it, vLLM's id 4"
    ):
        read(tmp_path, deep, ROWS[2])
    write_states(tmp_path, deep, ROWS, (0, 3, 4))
    with pytest.raises(DataError, match="begins with the embeddings, which is vLLM's id 0"):
        read(tmp_path, deep, ROWS[2])


def test_states_that_do_not_begin_with_the_embeddings_are_refused_if_id_0_says_so(tmp_path, deep):
    write_states(tmp_path, deep, ROWS, (0, 1, 3, 4))
    read(tmp_path, deep, ROWS[0], (0, 1, 3, 4))
    write_states(tmp_path, deep, ROWS, (1, 2, 3, 4))
    said = r"cmpl-0-0.safetensors does not begin with the embeddings, vLLM's id 0 \(relative distance .*, all"
    with pytest.raises(DataError, match=said) as error:
        read(tmp_path, deep, ROWS[0], (0, 1, 3, 4))
    assert "\n" not in str(error.value) and "features.layer_ids=[...]" in str(error.value)


@pytest.mark.corners
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_are_known_by_the_states_rounding(tmp_path, stored, dtype):
    """Gemma 3 multiplies them by a factor that is rounded in bf16; states in fp8 share a token's scale."""
    half, target = (random_target("gemma3_micro", dtype=one, seed=2) for one in ("bfloat16", dtype))
    weights = {name: one for name, one in target.model.state_dict().items() if "embed_scale" not in name}
    half.model.load_state_dict(weights, strict=False)
    ask = OutputRequest("none", hidden=(0, 1, -1))

    def write(ids):
        files = write_states(tmp_path, half, ROWS, ids, dtype=torch.float16 if stored == "float16" else None)
        for file in files if stored == "fp8" else []:
            whole = load_file(file)["hidden_states"].float()
            scale = whole.abs().amax((1, 2), keepdim=True) / 448
            changed(file, hidden_states=(whole / scale).to(torch.float8_e4m3fn), hidden_states_scales=scale)

    write((0, 1, 3))
    with pytest.raises(DataError, match="begins with the embeddings"):
        read(tmp_path, target, ROWS[0], ask=ask)
    write((0, 1, 2, 3))
    read(tmp_path, target, ROWS[0], (0, 1, 2, 3), ask)
    write((1, 2, 3))
    read(tmp_path, target, ROWS[0], ask=ask)
    with pytest.raises(DataError, match="does not begin with the embeddings"):
        read(tmp_path, target, ROWS[0], (0, 2, 3), OutputRequest("none", hidden=(1, -1)))


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ((1, 3), r"layer_ids=\[1, 3\] lacks 4, the last layer's output, .*layer_ids=\[1, 3, 4\]"),
        (
            (0, 2, 4),
            r"lacks \[1, 3\]: vLLM's id k is .* reads \[0, 2\] \(0-based\); pass method.layers=\[1\]",
        ),
        ((1, 3, 5), r"layer_ids=\[1, 3, 5\]; allowed: different ids from 0 .* to 4"),
        ((1, 1, 3, 4), "allowed: different ids"),
    ],
)
def test_layer_ids_that_do_not_serve_the_method_are_refused(tmp_path, deep, layer_ids, message):
    with pytest.raises(ConfigError, match=message) as error:
        EngineStates(tmp_path, deep, layer_ids).expect(ASK)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("outputs", [None, OutputRequest("none", hidden=(-1,), kv=(1,))])
def test_a_method_that_reads_more_is_refused(tmp_path, deep, outputs):
    with pytest.raises(
        ConfigError, match="features=engine has hidden states alone, and this method reads more"
    ):
        EngineStates(tmp_path, deep).expect(outputs)


def test_a_prompt_that_the_server_changed_is_explained(tmp_path, deep):
    write_states(tmp_path, deep, ROWS, IDS)
    states = EngineStates(tmp_path, deep)
    states.expect(ASK)
    for ids, message in (
        ([*ROWS[0], 5, 6], "cmpl-0-0.safetensors has 20 tokens in its place: the server cut the prompt"),
        ([5, 6, *ROWS[0]], "has 20 tokens in its place: the server cut the prompt"),
        (ROWS[1][:40], "cmpl-1-0.safetensors has 48 tokens in its place: generated tokens"),
        (ROWS[1][1:], "has 48 tokens in its place: the server put special tokens in front"),
    ):
        assert message in states.near(torch.tensor(ids))
    assert states.near(torch.tensor([7, 7, 7])) == ""


def test_a_loss_mask_in_a_file_is_compared_with_the_datas(tmp_path, deep):
    mask_T = torch.arange(N) > 9
    changed(write_states(tmp_path, deep, ROWS, IDS)[0], loss_mask=mask_T.long())
    states = EngineStates(tmp_path, deep)
    states.expect(ASK)
    key = row_key(torch.tensor(ROWS[0]), in_words(ASK))
    states.check_mask(key, mask_T, "one")
    states.check_mask(
        row_key(torch.tensor(ROWS[1]), in_words(ASK)), torch.ones(48), "two"
    )  # a file without one
    with pytest.raises(
        DataError, match="has a loss_mask of 10 labels, and document one of the data 20; pass data"
    ):
        states.check_mask(key, torch.ones(N), "one")


def test_settings_that_do_not_belong_to_an_engine_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"features.layer_ids=.*; allowed: null, or ids with features=engine"
    ):
        FeatureSettings(layer_ids=(1, 2))
    with pytest.raises(ConfigError, match="features=engine reads states as the engine wrote them"):
        FeatureSettings(mode="engine", folder="f", form="int8")
    with pytest.raises(
        ConfigError, match=r"holds no hidden states of an engine .*; pass features=engine:FOLDER"
    ):
        FeatureSettings(mode="engine", folder=str(tmp_path)).check_states()


def test_a_second_file_with_the_same_tokens_is_named(tmp_path, deep, caplog):
    write_states(tmp_path, deep, ROWS, IDS)
    with caplog.at_level("WARNING", logger="longtrain"):
        EngineStates(tmp_path, deep).expect(ASK)
        assert not caplog.records
        write_states(tmp_path, deep, ROWS[:1], IDS, name="later-{}")
        states = EngineStates(tmp_path, deep)
        states.expect(ASK)
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith(f"unused files=1 of {tmp_path}: later-") and len(states) == len(ROWS)


def logged(folder, target, caplog):
    """The log record of `next_token_nats`, the only one, of reading all documents."""
    states = EngineStates(folder, target)
    states.expect(ASK)
    with caplog.at_level("INFO", logger="longtrain"):
        for ids in ROWS:
            states.read(row_key(torch.tensor(ids), in_words(ASK)), "it")
    (line,) = [one for one in caplog.records if "next_token_nats" in one.getMessage()]
    return line


def test_the_targets_own_loss_is_logged_once(tmp_path, deep, caplog):
    write_states(tmp_path, deep, ROWS, IDS)
    ids_T = torch.tensor(ROWS[0])
    last = deep.packed(ids_T, torch.arange(N), (0, N), OutputRequest("none", hidden=(-1,))).hidden[-1]
    nats = float(torch.nn.functional.cross_entropy(deep.head(last)[:-1], ids_T[1:]))
    line = logged(tmp_path, deep, caplog)
    assert f"next_token_nats={nats:.3f} (4.575 if" in line.getMessage()
    assert line.levelname == ("WARNING" if nats >= 4.575 else "INFO")


@pytest.mark.parametrize("knows", [True, False])
def test_a_last_state_that_predicts_no_better_than_chance_is_warned_of(tmp_path, deep, caplog, knows):
    """The state points to the head's row of the next token, or away from it."""
    for file in write_states(tmp_path, deep, ROWS, IDS):
        whole = load_file(file)
        next_TE = deep.head_weight[whole["token_ids"].roll(-1)] / deep.final_norm_weight
        whole["hidden_states"][:, -1] = next_TE * (3 if knows else -3)
        changed(file, hidden_states=whole["hidden_states"])
    line = logged(tmp_path, deep, caplog)
    assert line.levelname == ("INFO" if knows else "WARNING") and "\n" not in line.getMessage()
    said = r"it is far below that: check that the engine .* \(4 in eagle_aux_hidden_state_layer_ids\)"
    assert bool(re.search(said, line.getMessage())) is not knows
