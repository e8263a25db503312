"""Registers recipes and the methods' dataclasses with Hydra's ConfigStore; only those that a command names
are read.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError
from longtrain.files import UTF8

FOLDER_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp")
"""Hydra's flags that name a folder of the user's own files."""


def mount(words: Sequence[str] | None = None) -> None:
    """Put recipes (`+recipe=NAME`) and method dataclasses (`method=NAME`) into Hydra's ConfigStore.

    A recipe is a global override named after its file; it exports and evaluates under that name. Its keys
    of its own suite are dropped if another suite is typed that lacks them.

    Args:
        words: words of the command line; recipes and methods that neither a word nor a recipe names are
            listed but not read. None, or words that bring files of the user's own: all are read.

    Raises:
        ConfigError: a user's own recipe lacks the header that makes it one.
    """
    from longtrain import methods
    from longtrain.prompt.help import bases_of

    _pass_over_marks()
    _take_mappings()
    _refuse_files(words or ())
    folder = asset_dir("recipes")
    names = [file.stem for file in sorted(folder.glob("*.yaml"))]
    own = own_folder(words or ())
    every = words is None or own is not None
    wanted = [name for name in names if every or any(name in word for word in words or ())]
    texts = list(words or ())
    for name in wanted:  # the list grows, because the bases of a recipe are read too
        texts.append((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        wanted += [base for base in bases_of(texts[-1]) if base in names and base not in wanted]
    if own is not None:
        _refuse_unmarked(own, texts)
    _list(folder)
    for name in methods.names():
        _list_method(name)
        if every or any(name in text for text in texts):
            _read_method(name)
    typed = [word.partition("=")[2] for word in words or () if word.startswith("suite=")]
    for name in wanted:
        _read(folder, name, typed[-1] if typed else "")


@cache
def _pass_over_marks() -> None:
    """Make Hydra find the header of a YAML file after a byte order mark, which some editors write.

    Without this, Hydra reads the file's keys but misses `# @package` in the first line.
    """
    from dataclasses import replace

    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult, ConfigSource

    Plugins.instance()  # registers the reader of YAML files
    reader: Any = SourcesRegistry.instance().resolve("file")
    usual = reader.load_config

    def load_config(self: Any, config_path: str) -> ConfigResult:
        found = usual(self, config_path)
        file = Path(self.path, self._normalize_file_name(config_path))
        if not file.read_bytes().startswith(BOM_UTF8):
            return found
        return replace(found, header=ConfigSource._get_header_dict(file.read_text(encoding=UTF8)[:512]))

    reader.load_config = load_config


@cache
def _take_mappings() -> None:
    """Make Hydra merge `KEY={...}` into the mapping at that key, whatever keys either has, as `+KEY={...}`.

    Without this, Hydra refuses each key that the mapping does not have yet, and so any for one whose keys are
    free, such as `optim.lr_multipliers`, which is empty. A wrong key of another mapping is still refused when
    its values are read, and one that is nowhere in the configuration by Hydra. `KEY={}` would change nothing,
    and is refused where the mapping has keys, because it reads as if it emptied it. `+KEY={...}` in place
    of it would let Hydra take a key that is nowhere, and `longtrain config` print it as if it counted.
    """
    from dataclasses import replace

    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.types import Override, OverrideType
    from omegaconf import DictConfig, OmegaConf

    usual = ConfigLoaderImpl._apply_overrides_to_config

    def apply(overrides: list[Override], cfg: DictConfig) -> None:
        for one in overrides:
            if one.type is OverrideType.CHANGE and isinstance(one.value(), dict):
                there = OmegaConf.select(cfg, one.key_or_group, throw_on_resolution_failure=False)
                if isinstance(there, DictConfig):
                    if there and not one.value():
                        key = one.key_or_group
                        raise ConfigError(
                            f"{key}={{}} adds no key to those it has: {', '.join(map(str, there))}; write "
                            f"~{key} to leave them out, or {key}={{KEY: VALUE}} to add one"
                        )
                    one = replace(one, type=OverrideType.ADD)
            usual([one], cfg)

    ConfigLoaderImpl._apply_overrides_to_config = staticmethod(apply)  # type: ignore[method-assign]


@cache
def _list(recipe_folder: Path) -> None:
    """Register the names of all recipes in the ConfigStore, which is global, so only once."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    # Hydra copies all sources for each group that it lists, and again what it loads.
    vars(store)["__deepcopy__"] = lambda memo: store
    for file in recipe_folder.glob("*.yaml"):
        store.store(group="recipe", name=file.stem, node={}, package="_global_", provider=file.name)


@cache
def _list_method(name: str) -> None:
    """Register a method's name in the ConfigStore, once: a dataclass that was read stays in its place."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="method", name=name, node={}, provider="longtrain.methods")


@cache
def _read_method(name: str) -> None:
    """Put a method's dataclass into the ConfigStore."""
    from dataclasses import field, fields, make_dataclass

    from hydra.core.config_store import ConfigStore

    from longtrain import methods

    own = methods.config_class(name)
    # Hydra cannot merge a mapping into a typed field that is null; `settings` checks its type anyway
    loose = [(f.name, Any, field(default=None)) for f in fields(own) if f.type == "dict[str, Any] | None"]
    schema = make_dataclass("Method", [*loose, ("name", str, field(default=name))], bases=(own,))
    ConfigStore.instance().store(group="method", name=name, node=schema, provider="longtrain.methods")


def _read(recipe_folder: Path, name: str, suite: str) -> None:
    """Put a recipe's content into the ConfigStore."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    file = recipe_folder / f"{name}.yaml"
    named = {"name": name, "artifact": "${home}/checkpoints/${name}"}
    node = OmegaConf.merge(named, _loaded(file))
    if (known := _suite_keys(suite)) and (own := OmegaConf.select(node, "suite")):
        kept = OmegaConf.masked_copy(own, [key for key in own if key in known])
        OmegaConf.update(node, "suite", kept, merge=False)
    ConfigStore.instance().store(group="recipe", name=name, node=node, package="_global_", provider=file.name)


@cache
def _loaded(file: Path) -> Any:
    """The content of a YAML file, cached because parsing is slow."""
    from omegaconf import OmegaConf

    return OmegaConf.load(file)


def _suite_keys(name: str) -> set[str]:
    """The keys of a bundled suite, including those of its bases; empty for other suites."""
    from omegaconf import OmegaConf

    from longtrain.prompt.help import bases_of

    file = asset_dir("conf") / "suite" / f"{name}.yaml"
    if not name or not file.is_file():
        return set()
    own = set(OmegaConf.select(OmegaConf.load(file), "suite") or ())
    return own.union(*(_suite_keys(base) for base in bases_of(file.read_text(encoding="utf-8"))))


@contextmanager
def composed_once(words: Sequence[str]) -> Iterator[None]:
    """Context manager: skip Hydra's second composition, which takes half of the time until values are
    checked.

    Hydra composes twice to find out if the configuration itself requests a sweep, which only users' own files
    and Hydra's own keys do; `--multirun` does not need it.
    """
    from hydra._internal.hydra import Hydra

    usual = Hydra.get_mode
    if not (own_folder(words) or any("hydra" in word for word in words)):
        Hydra.get_mode = lambda self, config_name, overrides: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = usual  # type: ignore[method-assign]


def own_folder(words: Sequence[str]) -> Path | None:
    """The folder of the user's own configuration files given by a flag, or None."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, _, value = word.partition("=")
        if flag in FOLDER_FLAGS:
            return Path(value or following)
    return None


def _refuse_files(words: Sequence[str]) -> None:
    """Refuse a recipe given as a path, and name the folder in which recipes are looked up."""
    for word in words:
        key, _, value = word.partition("=")
        file = Path(value.strip("'\""))
        if key.lstrip("+") != "recipe" or not (file.suffix in (".yaml", ".yml") or len(file.parts) > 1):
            continue
        listed = file.parent.name == "recipe"
        folder = file.parent.parent if listed else file.parent
        move = "" if listed else f"move it to {folder / 'recipe' / file.stem}.yaml and "
        raise ConfigError(
            f"+recipe={file} is a path, and a recipe is given by its name; {move}pass --config-dir "
            f"'{folder}' +recipe={file.stem}"
        )


def _refuse_unmarked(own: Path, words: Sequence[str]) -> None:
    """Refuse a user's own recipe (for example a copy of ours) that lacks Hydra's `# @package` header."""
    for file in (own / "recipe").glob("*.yaml"):
        if f"+recipe={file.stem}" in words and "# @package _global_" not in file.read_text(encoding="utf-8"):
            raise ConfigError(f"{file} has no line '# @package _global_'; put it above all others")
