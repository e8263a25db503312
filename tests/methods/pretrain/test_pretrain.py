"""Pretraining: the objective's weights, learning, the corpus, the rows, the export and its card."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from longtrain.config import RunConfig
from longtrain.data.packing.batch import Batch
from longtrain.errors import ConfigError, DataError
from longtrain.jobs.exporting import push
from longtrain.methods.pretrain.config import Config
from longtrain.methods.pretrain.corpus import build_corpus
from longtrain.methods.pretrain.spec import SPEC
from longtrain.methods.spec import DataRun
from longtrain.targets.loading import load_target

SMALL = dict(
    vocab_size=600, hidden_size=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, intermediate_size=48,
    max_positions=1024,
)  # fmt: skip
PROSE = "It was late in {0}. The rain went on, and nobody in {0} spoke of it again.\nThen {0} slept. "


def batch() -> Batch:
    ids_T = torch.arange(60) * 11 % 600
    weights_T = torch.tensor([0.0, 1.0, 1.5, 5.0, 0.0, 1.0]).repeat(10)
    weights_T[40] = 0.0
    return Batch(ids_T, (0, 40, 60), weights_T > 0, 0, int((weights_T > 0).sum()), weights_T=weights_T)


def test_the_loss_is_the_weighted_sum_over_labels_of_each_document() -> None:
    module = SPEC.build(Config(**SMALL), None)
    loss = SPEC.objective(module, None, Config(**SMALL))(batch())
    expected = torch.zeros(())
    for start, stop in ((0, 40), (40, 60)):
        ids = batch().ids_T[start:stop]
        hidden_TE = module(ids, (0, len(ids)))
        nll_T = cross_entropy(hidden_TE[:-1] @ module.head_weight.T, ids[1:], reduction="none")
        expected = expected + (nll_T * batch().weights_T[start + 1 : stop]).sum()
    torch.testing.assert_close(loss.total, expected)
    assert loss.metrics["value_loss"][1] == 10 and loss.tokens == batch().tokens_in_step


def test_one_batch_is_learned_by_heart() -> None:
    module = SPEC.build(Config(**SMALL), None)
    objective = SPEC.objective(module, None, Config(**SMALL))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = objective(batch())
        losses.append(float(loss.total.detach()))
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    assert float(loss.metrics["value_accuracy"][0]) == 10


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "books").mkdir()
    for name in ("kent", "dover", "secret"):
        text = "".join(PROSE.format(f"{name} number {i}") for i in range(150))
        (folder / "books" / f"{name}.txt").write_text(text)
    row = {"question": "Who slept?", "answer": "Kent <<1+1=2>> slept."}
    (folder / "chat.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def data(sources: Path, **changes: object) -> dict:
    stages = [{"fraction": 1.0, "sequence_tokens": 2000, "doc_tokens": 700}]
    values = {
        "name": "d", "books": str(sources / "books"), "code": None, "instruct": str(sources / "chat.jsonl"),
        "held_out": ["secret"], "shares": {"needles": 1, "text": 1, "chat": 1}, "stream_weights": {"book": 1},
        "min_doc_tokens": 256, "stages": stages,
    }  # fmt: skip
    return {**values, **changes}


def test_rows_come_from_the_corpus_and_nothing_held_out(sources: Path, tmp_path: Path) -> None:
    about = DataRun(tmp_path, max_steps=3, accumulate=2)
    module = SPEC.data(Config(**SMALL), data(sources), about)
    rows = list(module.train_dataloader())
    assert len(rows) == 6 and {len(row.ids_T) for row in rows} == {2000}
    corpus = json.loads((tmp_path / "data/d/corpus.json").read_text())
    made = (tmp_path / "data/d/corpus.json").stat().st_mtime_ns
    assert corpus["chats"] == 1 and "secret.txt" in corpus["facts"]["sources"]["book"]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "data/d/tokenizer/tokenizer.json"))
    text = tokenizer.decode([i for row in rows for i in row.ids_T.tolist()], skip_special_tokens=False)
    assert "kent number" in text and "secret" not in text.replace("for secret", "").replace("-secret", "")
    assert "Who slept?<|assistant|>Kent  slept.<|end|>" in text
    SPEC.data(Config(**SMALL), data(sources), about)
    assert (tmp_path / "data/d/corpus.json").stat().st_mtime_ns == made


def test_wrong_data_keys_are_told(sources: Path, tmp_path: Path) -> None:
    about = DataRun(tmp_path, max_steps=1, accumulate=1)
    with pytest.raises(ConfigError, match=r"unknown key data\.colour"):
        SPEC.data(Config(**SMALL), data(sources, colour=1), about)
    with pytest.raises(ConfigError, match=r"data\.books=FOLDER"):
        SPEC.data(Config(**SMALL), data(sources, books=None), about)
    with pytest.raises(ConfigError, match=r"trainer\.max_steps"):
        SPEC.data(Config(**SMALL), data(sources), DataRun(tmp_path, max_steps=None, accumulate=1))
    with pytest.raises(DataError, match="'typo'"):
        SPEC.data(Config(**SMALL), data(sources, held_out=["typo"]), about)
    assert not (tmp_path / "data").exists()


def test_export_writes_a_target_and_its_card(sources: Path, tmp_path: Path) -> None:
    build_corpus(
        tmp_path / "c", Config(**SMALL), books=str(sources / "books"), code=None, instruct=None, held_out=[]
    )
    config = Config(**SMALL, tokenizer=str(tmp_path / "c/tokenizer"))
    curves = tmp_path / "run" / "train" / "curves.png"
    curves.parent.mkdir(parents=True)
    curves.write_bytes(b"a picture")
    cfg = RunConfig({"run_dir": str(tmp_path / "run"), "push": None})
    facts = {"argv": ["longtrain", "train", f"data.books={sources}/books"], "step": 7, "license": "mit"}
    push.target(cfg, SPEC, config, SPEC.build(config, None), folder=tmp_path / "tiny", facts=facts)
    target = load_target(tmp_path / "tiny", dtype="float32")
    assert target.info.vocab_size == 600 and target.tokenizer is not None
    text = (tmp_path / "tiny/README.md").read_text()
    assert text.startswith("---\nlicense: mit\n") and "# tiny\n\nA Llama of 0." in text
    assert "longtrain train" in text and "- step: 7" in text and "Data: not recorded." in text
    assert "![training](training.png)" in text and (tmp_path / "tiny/training.png").is_file()
    assert text.count("## Training") == 1 and str(sources) not in text and "data.books=books" in text
    with pytest.raises(ConfigError, match=r"method\.tokenizer"):
        SPEC.export(SPEC.build(Config(**SMALL), None), Config(**SMALL), tmp_path / "x", {})
