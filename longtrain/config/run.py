"""The configuration of one job, parsed once from the composed Hydra config.

`RunConfig` is what every job receives. Each group of keys (`target`, `decode`, `trainer`, ...) is an
attribute of its own type. A group is validated at its first access and then cached, so a job pays
nothing for groups that it does not use, and a wrong value is reported where it is used. Parsing does not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from longtrain import methods
from longtrain.config.groups import (
    ArtifactSource,
    DecodeConfig,
    EvictConfig,
    MethodChoice,
    SuiteConfig,
    TargetConfig,
)
from longtrain.config.job_keys import (
    AnswersKeys,
    EvalKeys,
    ExportKeys,
    GenerateKeys,
    PlanKeys,
    PrepareKeys,
    ServeKeys,
)
from longtrain.data.config import DataConfig, Listed, PackingStage
from longtrain.errors import ConfigError
from longtrain.features.settings import FeatureSettings
from longtrain.settings import AUTO, Name, Text, convert, read, rules_of, wrong
from longtrain.training.optim import Optim
from longtrain.training.settings import LoopConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from longtrain.decoding.sampling import Sampling

T = TypeVar("T")

LONGEST_PATH = 4095
"""The longest path in bytes that the operating system accepts; one component may have 255."""


@dataclass(frozen=True)
class RunConfig:
    """The typed configuration of one job.

    Args:
        values: all keys as plain containers with interpolations resolved; this is what a run's records store.
    """

    values: Mapping[str, Any]

    @classmethod
    def from_hydra(cls, cfg: DictConfig) -> RunConfig:
        """Build the typed view of a composed configuration; later changes of `cfg` have no effect on it."""
        from omegaconf import OmegaConf

        values: Any = OmegaConf.to_container(cfg, resolve=True)
        return cls(values)

    def having(self, **values: Any) -> RunConfig:
        """A copy of this configuration with some keys replaced."""
        return RunConfig({**self.values, **values})

    @cached_property
    def name(self) -> str:
        """The name of the run, and of the artifact that it exports."""
        return str(self._key("name", Name))

    @cached_property
    def home(self) -> Path:
        """The folder that holds `runs`, `data` and `checkpoints`."""
        return Path(self._key("home", Text))

    @cached_property
    def run_dir(self) -> Path:
        """The folder of the run's outputs; each job writes its own folder in it."""
        return Path(self._key("run_dir", Text))

    @property
    def checkpoints(self) -> Path:
        """The folder that exported artifacts are written to."""
        return self.home / "checkpoints"

    @cached_property
    def seed(self) -> int:
        """The seed of initial weights, data order, shifts and sampling."""
        return int(self._key("seed", int))

    @cached_property
    def quiet(self) -> bool:
        """True if jobs start without printing the typed overrides."""
        return bool(self._key("quiet", bool, usual=False))

    @property
    def dry_run(self) -> bool:
        """True if everything is checked and nothing is run."""
        return bool(self.values.get("dry_run"))

    @cached_property
    def unverified(self) -> bool:
        """True if artifacts that fail verification are used all the same."""
        return bool(self._key("unverified", bool, usual=False))

    @property
    def trained_by(self) -> str | None:
        """The trainer (tool) that wrote a draft in another tool's format."""
        return self.values.get("trained_by")

    @property
    def artifact_source(self) -> ArtifactSource:
        """Where artifacts are found by name, and which of them are accepted."""
        return ArtifactSource(self.home, self.trained_by, self.unverified)

    @property
    def init(self) -> str | None:
        """The artifact whose weights training starts from."""
        init = self.values.get("init")
        return str(init) if init else None

    @property
    def push(self) -> str | None:
        """The Hub repository that exports are uploaded to."""
        push = self.values.get("push")
        return str(push) if push else None

    @property
    def resume(self) -> str:
        """`auto`, `never`, or the path of the checkpoint to resume training from."""
        return str(self.values.get("resume", AUTO))

    @property
    def cache(self) -> Any:
        """The KV cache of the target, in the syntax of a `suite.systems` entry."""
        return self.values.get("cache")

    @cached_property
    def artifacts(self) -> tuple[str, ...]:
        """Names of the exported modules to use: `artifact=NAME` or `artifact=[NAME,NAME]`.

        Raises:
            ConfigError: the value is neither a name nor a list of names.
        """
        value = self.values.get("artifact")
        names = value if isinstance(value, list) else [value] if value else []
        if not all(isinstance(name, str) and name for name in names):
            raise wrong(
                "artifact",
                value,
                "a name, or a list of names such as [draft,eviction], in quotes where one reads as a number",
            )
        for name in names:
            if len(name.encode()) > LONGEST_PATH or any(len(part.encode()) > 255 for part in name.split("/")):
                shown = f"{name[:60]}... ({len(name)} characters)"
                raise wrong("artifact", shown, "a name that a file can have")
        return tuple(names)

    @cached_property
    def target(self) -> TargetConfig:
        """The group `target`: the frozen model."""
        return read(TargetConfig, self._group("target"), "target")

    @cached_property
    def method(self) -> MethodChoice | None:
        """The method to train or use, or None if none is chosen."""
        values = self._group("method")
        return MethodChoice(str(values["name"]), values) if values else None

    @property
    def trained_method(self) -> MethodChoice:
        """The method of a job that trains one, which must be chosen.

        Raises:
            ConfigError: none is chosen.
        """
        if self.method is None:
            raise ConfigError(
                "no method is chosen (method=null); pass +recipe=NAME, or method=NAME with one of: "
                f"{', '.join(methods.names())}"
            )
        return self.method

    @cached_property
    def decode(self) -> DecodeConfig:
        """The group `decode`: the shape of the drafted tree, and how tokens are sampled."""
        return read(DecodeConfig, self._group("decode"), "decode")

    @cached_property
    def sampling(self) -> Sampling:
        """The sampling settings (temperature, top-p, top-k); accessing them imports torch.

        Raises:
            ConfigError: a value is out of its range.
        """
        return self.decode.sampling(self.seed)

    @cached_property
    def evict(self) -> EvictConfig:
        """The group `evict`: which KV entries of the prompt stay in the cache."""
        return EvictConfig.parse(self._group("evict"))

    @cached_property
    def select(self) -> dict[str, Any]:
        """The keys of `select` that are set; they choose which KV entries a decoding step reads."""
        return {key: value for key, value in self._group("select").items() if value is not None}

    @property
    def data_values(self) -> Mapping[str, Any]:
        """The keys of `data` as typed, for methods with a corpus of their own; empty if no data is chosen."""
        return self._group("data")

    @cached_property
    def data(self) -> DataConfig:
        """The group `data`: the mixture of documents to train on.

        Raises:
            ConfigError: no data is chosen, or a key or value of it is wrong.
        """
        values = self.values.get("data")
        if not isinstance(values, Mapping):
            raise ConfigError("no data is chosen (data=null); pass data=NAME, e.g. data=text data.text=PATH")
        return DataConfig.parse(values)

    @cached_property
    def stages(self) -> tuple[PackingStage, ...]:
        """The packing stages of the run, for the mixture of documents or a method's own corpus."""
        listed = convert(self.data_values.get("stages") or (), Listed, "data.stages")
        return tuple(PackingStage.parse(item) for item in listed)

    @cached_property
    def optim(self) -> Optim:
        """The optimizer and its schedule."""
        return read(Optim, self._group("optim"), "optim")

    @cached_property
    def trainer(self) -> LoopConfig:
        """The group `trainer`; the strategy stays as typed, a class being named by its `_target_`."""
        return read(LoopConfig, self._group("trainer"), "trainer")

    @cached_property
    def features(self) -> FeatureSettings:
        """The group `features`: run the target during training, or read its stored outputs.

        Raises:
            ConfigError: a key or value is wrong, or there is no folder to store in.
        """
        settings = read(FeatureSettings, self._group("features"), "features")
        if settings.mode != "online" and settings.folder is None:
            raise ConfigError(f"features={settings.mode} needs a folder; pass features.folder=FOLDER")
        return settings

    @property
    def loggers(self) -> Mapping[str, Any]:
        """Lightning loggers: name -> mapping with `_target_`."""
        return self._group("logger")

    @property
    def callbacks(self) -> Mapping[str, Any]:
        """Lightning callbacks of training: name -> mapping with `_target_`."""
        return self._group("callbacks")

    @cached_property
    def suite(self) -> SuiteConfig:
        """The group `suite`: what `eval` or `bench` measures."""
        values = self._group("suite")
        return SuiteConfig(str(values["name"]), values)

    @cached_property
    def generate(self) -> GenerateKeys:
        """The keys of the job `generate`; `demo` shares one of them."""
        return self._keys(GenerateKeys)

    @cached_property
    def serve(self) -> ServeKeys:
        """The keys of the job `serve`."""
        return self._keys(ServeKeys)

    @cached_property
    def evaluation(self) -> EvalKeys:
        """The keys of the job `eval`."""
        return self._keys(EvalKeys)

    @cached_property
    def prepare(self) -> PrepareKeys:
        """The keys of the job `prepare`."""
        return self._keys(PrepareKeys)

    @cached_property
    def answers(self) -> AnswersKeys:
        """The keys of the job `answers`."""
        return self._keys(AnswersKeys)

    @cached_property
    def export(self) -> ExportKeys:
        """The keys of the job `export`."""
        return self._keys(ExportKeys)

    @cached_property
    def plan(self) -> PlanKeys:
        """The keys of the job `plan`."""
        return self._keys(PlanKeys)

    def _key(self, name: str, kind: Any, *, usual: Any = None) -> Any:
        """Read and check one key outside all groups."""
        return convert(self.values.get(name, usual), kind, name)

    def _keys(self, kind: type[T]) -> T:
        """Read and check the keys of a dataclass outside all groups; keys that the job lacks get their
        defaults.
        """
        hints = rules_of(kind)
        given = {key: self._key(key, hint) for key, hint in hints.items() if key in self.values}
        return kind(**given)

    def _group(self, name: str) -> Mapping[str, Any]:
        """The values of a group as typed; empty if no option of the group is chosen."""
        return self.values.get(name) or {}
