"""The recipes of LookaheadKV: the paper's values where they are known, one base, and the mixture's counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from longtrain import cli
from longtrain.assets import asset_dir
from longtrain.config import RunConfig
from longtrain.errors import ConfigError
from longtrain.jobs import features, train

TARGETS = ("llama1b", "llama3b", "llama8b", "qwen3_1b7", "qwen3_4b", "qwen3_8b")


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):
        yield


def recipe(name: str, *overrides: str) -> DictConfig:
    return compose("train", overrides=[f"+recipe=lookaheadkv_{name}", *overrides])


@pytest.mark.parametrize("target", TARGETS)
def test_paper_values(target: str) -> None:
    """LookaheadKV Section 4.1 and Table 16."""
    cfg = recipe(target)
    assert (cfg.method.name, cfg.method.n_lookahead) == ("lookaheadkv", 32)
    assert (cfg.method.lora_rank, cfg.method.lora_alpha, cfg.method.lora_targets) == (8, 32.0, "all")
    assert (cfg.method.pool_kernel, cfg.method.reduction, cfg.method.suffix_window) == (7, "mean", 0)
    assert (cfg.optim.schedule, cfg.optim.weight_decay) == ("cosine", 0.0)
    assert (cfg.data.answers, cfg.data.answer_tokens, list(cfg.data.prompt_tokens)[1]) == (
        "target",
        512,
        16384,
    )
    (stage,) = cfg.data.stages
    assert stage.epochs == 1 and stage.doc_tokens == cfg.data.max_doc_tokens == 16384 + 512
    assert stage.doc_tokens <= cfg.target.shape.max_positions
    assert cfg.target.chat_template == ("chatml" if "qwen" in target else "llama3")
    assert list(cfg.job) == ["train", "export", "eval"] and cfg.suite.name == "eviction"


def test_the_six_targets_share_one_base() -> None:
    found = [recipe(target) for target in TARGETS]
    first = found[0]
    assert all((cfg.method, cfg.optim, cfg.data) == (first.method, first.optim, first.data) for cfg in found)
    assert len({cfg.target.path for cfg in found}) == len(TARGETS)


def test_the_mixture_has_86_thousand_rows() -> None:
    rows = {source.manifest: source.rows for source in recipe("llama8b").data.sources}
    assert rows.pop("chatqa2_long") == 50_000 and rows.pop("tulu3") == 20_000 and rows.pop("stack") == 7_000
    assert rows == {"fewshot_metamath": 3_000, "fewshot_arc": 3_000, "fewshot_hellaswag": 3_000}


@pytest.mark.parametrize("name", ["llama8b", "small", "tiny"])
def test_variants_are_one_key_each_of_the_data(name: str) -> None:
    for key, value in (("answers", "source"), ("question", "response"), ("prompt_tokens", [512, 2048])):
        cfg = recipe(name, f"data.{key}={value}")
        made = RunConfig.from_hydra(cfg).data
        assert getattr(made, key) == (tuple(value) if isinstance(value, list) else value)
        assert made.labels == "last_answer"


def test_the_small_mixture_is_of_questions_for_the_most_part() -> None:
    """With 60 novels and 4000 files of code that are long enough for a prompt; the recipe has half of it."""
    small = RunConfig.from_hydra(recipe("small", "data.books=books", "data.code=code"))
    assert small.data.sources[-1].rows == small.data_values["questions"] == 7168
    words = ["data=lookaheadkv_small", "data.books=books", "data.code=code"]
    made = RunConfig.from_hydra(compose("train", overrides=words)).data
    books, code, _, questions = made.sources
    counts = [60 * books.prompts * books.weight, 4000 * code.prompts * code.weight, questions.rows]
    shares = [count / sum(counts) for count in counts]
    assert shares == pytest.approx([0.15, 0.10, 0.75], abs=0.01) and questions.rows == 14_000
    assert all(made.written_by_target(source) for source in made.sources)
    assert made.answer_batch_tokens >= made.prompt_tokens[1] + made.answer_tokens


@pytest.mark.parametrize("name", ["small", "tiny"])
def test_no_stage_cuts_a_prompt_from_its_answer(name: str) -> None:
    data = recipe(name).data
    assert all(s.doc_tokens >= data.prompt_tokens[1] + data.answer_tokens for s in data.stages)


@pytest.mark.parametrize(
    ("question", "response", "message"),
    [
        (
            "response",
            "answer",
            r"data\.question=response .*pass method\.response=question_answer or data\.question=prompt$",
        ),
        (
            "prompt",
            "question_answer",
            r"data\.question=prompt .*pass method\.response=answer or data\.question=response$",
        ),
        ("prompt", "answer", None),
        ("response", "question_answer", None),
    ],
)
def test_data_and_method_agree_on_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str, response: str, message: str | None
) -> None:
    class ReachedError(Exception):
        """The run went on to load the target."""

    def load(*args: object, **keys: object) -> None:
        raise ReachedError

    monkeypatch.setattr(features, "load_target", load)
    chosen = (f"data.question={question}", f"method.response={response}")
    cfg = recipe("tiny", f"home={tmp_path}", "name=one", "trainer=cpu", *chosen)
    with pytest.raises(ConfigError if message else ReachedError, match=message):
        train.run(RunConfig.from_hydra(cfg))
