"""Every recipe composes for every job and names things that exist; every key says what it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from longtrain import cli, methods
from longtrain.assets import asset_dir
from longtrain.config import RunConfig
from longtrain.data.config import DataConfig
from longtrain.jobs import JOBS
from longtrain.settings import parse_tokens

RECIPES = tuple(cli.recipes())
CONF = asset_dir("conf")
YAMLS = sorted([*CONF.rglob("*.yaml"), *asset_dir("recipes").glob("*.yaml")])
TARGETS = ("llama8b", "vicuna7b", "vicuna13b", "longchat7b", "longchat13b", "qwq32b", "qwen3_8b")
TEMPLATES = {file.stem for file in (CONF / "target" / "templates").glob("*.jinja")}
STAGES = ("anchor", "long", "sft")


EACH_JOB = [job if job in ("train", "eval") else pytest.param(job, marks=pytest.mark.slow) for job in JOBS]
"""Groups are the same for all jobs; training and evaluation have most keys of their own."""


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@cache
def composed(job: str, *overrides: str) -> DictConfig:
    """To be read alone: all tests share it."""
    return compose(job, overrides=list(overrides))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_and_its_values_are_accepted_by_what_they_configure(recipe: str) -> None:
    """One without training asks for no artifact, although `cli.mount` names one for every recipe."""
    cfg = composed("train", f"+recipe={recipe}")
    kind = methods.config_class(cfg.method.name)
    trained = methods.get(cfg.method.name).objective is not None
    assert cfg.name == recipe
    assert trained or cfg.artifact is composed("eval", f"+recipe={recipe}").artifact is None
    values: Any = OmegaConf.to_container(cfg, resolve=True)  # every interpolation leads somewhere
    method = {key: value for key, value in values["method"].items() if key != "name"}
    kind(**method)
    assert {field.name for field in fields(kind)} - {"name"} == set(method)
    if trained and kind is not methods.config_class("pretrain"):  # it reads its own corpus
        DataConfig.parse(values["data"])
    RunConfig(values).decode.one_shape()
    lengths = values["lengths"] if "lengths" in values else [values["suite"]["window"]]  # of perplexity
    assert lengths and all(parse_tokens(length) > 0 for length in lengths)


@pytest.mark.slow
@pytest.mark.parametrize("job", [job for job in JOBS if job != "train"])
def test_every_recipe_composes_for_every_other_job(job: str) -> None:
    for recipe in RECIPES:
        cfg = composed(job, f"+recipe={recipe}")
        OmegaConf.to_container(cfg, resolve=True)
        assert cfg.name == recipe


@pytest.mark.parametrize("job", EACH_JOB)
def test_every_group_option_composes(job: str) -> None:
    """One option of each group at a time; groups with few options begin anew."""
    folders = [path for path in CONF.iterdir() if path.is_dir() and path.name not in ("hydra", "debug")]
    options = {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}
    for i in range(max(map(len, options.values()))):
        words = [f"{group}={names[i % len(names)]}" for group, names in options.items()]
        OmegaConf.to_container(composed(job, *words), resolve=True)


def test_debug_options_compose_with_a_recipe() -> None:
    options = [path.stem for path in (CONF / "debug").glob("*.yaml")]
    assert "smoke" in options
    for option in options:
        composed("train", "+recipe=quickstart", f"+debug={option}")


@pytest.mark.parametrize("stage", STAGES)
def test_the_seven_targets_share_one_base(stage: str) -> None:
    def shared(cfg: DictConfig) -> dict[str, Any]:
        method = {key: value for key, value in cfg.method.items() if key != "offset_max_tokens"}
        return {"method": method, "optim": cfg.optim, "decode": cfg.decode}

    found = [composed("train", f"+recipe=longspec_{target}_{stage}") for target in TARGETS]
    assert all(shared(cfg) == shared(found[0]) for cfg in found)
    assert len({cfg.target.path for cfg in found}) == 7


@pytest.mark.parametrize("target", TARGETS)
def test_stages_follow_each_other(target: str) -> None:
    anchor, long, sft = (composed("train", f"+recipe=longspec_{target}_{stage}") for stage in STAGES)
    assert anchor.init is None
    assert long.init == anchor.artifact == f"./checkpoints/longspec_{target}_anchor"
    assert sft.init == long.artifact


@pytest.mark.parametrize("target", TARGETS)
def test_paper_values(target: str) -> None:
    """LongSpec Section 4.1 and Appendix B, and what the authors' code adds."""
    anchor, long, sft = (composed("train", f"+recipe=longspec_{target}_{stage}") for stage in STAGES)
    assert [cfg.optim.lr for cfg in (anchor, long, sft)] == [5e-4, 5e-6, 5e-6]
    for cfg, sequences in ((anchor, 2048), (long, 256), (sft, 256)):
        (stage,) = cfg.data.stages
        assert stage.sequence_tokens // stage.doc_tokens * cfg.trainer.sequences_per_step == sequences
        assert stage.epochs == 1
        assert list(cfg.optim.betas) == [0.9, 0.95]
        assert (cfg.optim.weight_decay, cfg.optim.eps, cfg.optim.schedule) == (0.1, 1e-6, "cosine")
        assert cfg.trainer.gradient_clip_val == 1.0
        assert cfg.method.window == 512 and cfg.method.anchors == 4 and cfg.method.objective == "ce"
        assert list(cfg.decode.shape) == [4, 16, 16, 16, 16]
    assert [cfg.method.anchor_offset for cfg in (anchor, long, sft)] == [True, False, False]
    assert sft.data.mask == "template" and sft.target.chat_template in TEMPLATES
    assert sft.target.max_positions in (None, sft.target.shape.max_positions)
    reach = anchor.method.offset_max_tokens
    assert reach == (16384 if target in ("vicuna7b", "vicuna13b", "longchat7b", "longchat13b") else 31744)
    assert reach <= anchor.target.shape.max_positions
    for cfg in (long, sft):
        assert cfg.data.stages[0].doc_tokens <= cfg.target.shape.max_positions


def test_command_line_beats_the_recipe() -> None:
    cfg = composed("eval", "+recipe=longspec_llama8b_sft", "decode=autoregressive", "lengths=[3k]")
    assert list(cfg.decode.shape) == [] and list(cfg.suite.lengths) == ["3k"]
    assert composed("train", "+recipe=quickstart", "method.window=64").method.window == 64


def test_ablations_are_one_key_each() -> None:
    for key in ("cross_attention", "anchor_offset", "flash_noisy"):
        cfg = composed("train", "+recipe=longspec_small", f"method.{key}=false")
        assert cfg.method[key] is False


@pytest.mark.parametrize("file", YAMLS, ids=[str(file.relative_to(file.parent.parent)) for file in YAMLS])
def test_files_begin_with_what_they_are(file: Path) -> None:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if "@package" not in line]
    assert lines[0].startswith("# ") and len(lines[0]) > 20, "the first line says what choosing this gives"


def documents_its_keys(file: Path) -> bool:
    """Not so for recipes and debug options, and options that inherit: they set keys that others document."""
    if "hydra" in file.parts or file.parent.name in ("recipes", "debug"):
        return False
    return file.parent == CONF or "defaults" not in yaml.safe_load(file.read_text(encoding="utf-8"))


OWN_KEYS = [file for file in YAMLS if documents_its_keys(file)]


@pytest.mark.parametrize("file", OWN_KEYS, ids=[str(file.relative_to(CONF)) for file in OWN_KEYS])
def test_every_key_in_conf_has_a_comment(file: Path) -> None:
    for line in file.read_text(encoding="utf-8").splitlines():
        key, colon, value = line.partition(":")
        leaf = bool(colon) and key.strip().isidentifier() and bool(value.split("#")[0].strip())
        if leaf and key.strip() not in ("name", "job", "_target_"):
            assert "#" in line, f"{file.name}: {line.strip()} has no comment"
