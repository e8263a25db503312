import pytest
from omegaconf import OmegaConf

from longtrain.assets import asset_dir
from longtrain.data.config import DataConfig
from longtrain.data.manifest import Manifest

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
