import pytest
from omegaconf import OmegaConf

from longtrain.assets import asset_dir
from longtrain.data.config import DataConfig
from longtrain.data.read.manifest import Manifest
from longtrain.errors import ConfigError

NAMES = sorted(
    path.stem for path in (asset_dir("conf") / "data").glob("*.yaml") if path.stem != "target_tiny"
)


@pytest.mark.parametrize("name", NAMES)
def test_every_mixture_is_well_formed(name):
    cfg = OmegaConf.create({"data": OmegaConf.load(asset_dir("conf") / "data" / f"{name}.yaml")})
    config = DataConfig.parse(OmegaConf.to_container(cfg.data, resolve=True))
    assert config.name == name and config.stages
    for source in config.sources:
        assert source.reader != "manifest" or Manifest.load(source.where).parts


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_a_comment(name):
    for line in (asset_dir("conf") / "data" / f"{name}.yaml").read_text().splitlines():
        bare = line.strip() in ("sources:", "stages:") or "manifest" in line or "{" in line
        assert not line.strip() or "#" in line or bare, f"{name}: no comment on: {line}"


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"step": 3, "sequence_tokens": 8, "doc_tokens": 8},
            "unknown key 'data.stages.step'; known: sequence_tokens",
        ),
        ({"steps": 3, "sequence_tokens": 8}, "doc_tokens is missing; allowed: a whole number"),
        (
            {"steps": 3, "sequence_tokens": "many", "doc_tokens": 8},
            "sequence_tokens=many; allowed: a whole number",
        ),
        ({"fraction": "half", "sequence_tokens": 8, "doc_tokens": 8}, "fraction=half; allowed: a number"),
        (3, "item=3; allowed: a mapping"),
    ],
)
def test_a_wrong_stage_is_one_clear_error(stage, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig.parse({"name": "x", "sources": [{"text": "y"}], "stages": [stage]})
