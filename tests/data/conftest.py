import json

import numpy as np
import pytest

from longtrain.data.packing.prepared import PREPARED, Prepared, PreparedWriter
from longtrain.data.retrieval.material import ChatIds, TextStream
from longtrain.data.retrieval.synthetic import RetrievalWriter
from longtrain.data.retrieval.wording import PRETRAIN, RULER
from longtrain.folders import replaced_folder
from tests.data.latin import TEXT, VOCABULARY, encode

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A byte-level tokenizer without merges: 256 bytes and four special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    specials = ["<|start|>", "<|user|>", "<|assistant|>", "<|end|>"]
    vocab = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(specials)
    inner.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def make_prepared(tmp_path):
    """Prepared data from document lengths; ids count up, so a token says where it is from."""

    def make(lengths, *, masks=None, sources=None, val=(), weights=None, name="made", kinds=None):
        folder = tmp_path / name
        with replaced_folder(folder, PREPARED) as temporary:
            writer = PreparedWriter(temporary, 1 << 20)
            at = 0
            for i, length in enumerate(lengths):
                ids = np.arange(at, at + length)
                mask = np.ones(length, np.uint8) if masks is None else np.asarray(masks[i], np.uint8)
                writer.add(
                    ids,
                    mask,
                    name=f"doc{i}",
                    kind="text" if kinds is None else kinds[i],
                    source=0 if sources is None else sources[i],
                    val=i in val,
                )
                at += length
            writer.close({"weights": weights or [1.0], "sources": []})
        return Prepared.open(folder)

    return make


@pytest.fixture(scope="module", params=[RULER, PRETRAIN], ids=["ruler", "pretrain"])
def writer(request) -> RetrievalWriter:
    """Writes retrieval documents over text of bytes, in the words of either form."""
    stream = TextStream(np.array(encode(TEXT), dtype=np.uint16), VOCABULARY, "book")
    return RetrievalWriter(encode, ChatIds((256,), (257,), (258,)), [stream], wording=request.param)
