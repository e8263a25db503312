"""The tokenizer trained from scratch: lossless, digits apart, special tokens, marks over the answers."""

import json
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoTokenizer

from longtrain.errors import ConfigError, DataError
from longtrain.targets.at_hand import HUB_FILES
from longtrain.targets.tokenizer import CHAT_BY_DEFAULT, SPECIALS, chats, read_tokenizer, train_tokenizer

TEXTS = ["the old man and the sea and the boat, 1234567 times over; the theory of it\n"] * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, folder, size=280, max_positions=512)
    return AutoTokenizer.from_pretrained(folder)


def test_special_tokens_come_first(tokenizer) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 3, 280)


def test_any_text_comes_back_and_nothing_is_added(tokenizer) -> None:
    for text in ("the boat", " größe 龙 🙂\n\n\tif x != y:", "  two  spaces "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_digits_are_tokens_of_their_own(tokenizer) -> None:
    ids = tokenizer.encode("1234567")
    assert len(ids) == 7 and len(set(ids)) == 7


def test_the_template_marks_answers_and_their_end(tokenizer) -> None:
    chat = [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "old"}] * 2
    out = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    labelled = [i for i, on in zip(out["input_ids"], out["assistant_masks"], strict=True) if on]
    assert labelled == [*tokenizer.encode("old"), 3] * 2
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>the sea<|assistant|>"


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than 260"):
        train_tokenizer(TEXTS, tmp_path, size=100)
    with pytest.raises(DataError, match="give more text"):
        train_tokenizer(["a b"], tmp_path, size=4096)
    assert not list(tmp_path.iterdir())


def test_byte_pairs_keep_their_spaces_and_nothing_warns_of_it(tmp_path: Path, tokenizer) -> None:
    """Published folders ask for BERT's clean-up, which transformers leaves out with a warning each time."""
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["clean_up_tokenization_spaces"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    assert AutoTokenizer.from_pretrained(tmp_path).clean_up_tokenization_spaces
    found, _ = read_tokenizer(str(tmp_path))
    assert not found.clean_up_tokenization_spaces  # the warning comes where it is set
    text = "Hi , there ."
    assert found.decode(found(text, add_special_tokens=False).input_ids) == text


def test_a_template_makes_a_chat_model_unless_the_files_say_otherwise(tokenizer) -> None:
    assert not chats(tokenizer)  # trained from scratch: it continues text
    tokenizer.init_kwargs.pop(CHAT_BY_DEFAULT)
    assert chats(tokenizer)
    tokenizer.init_kwargs[CHAT_BY_DEFAULT] = False
    assert not chats(None)


def test_all_files_of_a_tokenizer_are_fetched_of_the_hub() -> None:
    needed = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"]
    assert list(filter_repo_objects([*needed, "LICENSE.txt"], allow_patterns=HUB_FILES)) == needed
