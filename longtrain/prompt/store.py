"""What Hydra finds beside `conf`: recipes and the methods' dataclasses. Only what a command names is read."""

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
    """Put every recipe (`+recipe=NAME`) and method dataclass (`method=NAME`) into Hydra's ConfigStore.

    A recipe is a global override named after its file; it exports and evaluates under that name. What it says
    of its own suite is left out where another one is typed that has no such keys.

    Args:
        words: of a command line; recipes and methods that neither a word nor a recipe names are listed, and
            not read. None, or words that bring files of the user's own: all are read.

    Raises:
        ConfigError: a recipe of the user's own would not be read as one.
    """
    from longtrain import methods
    from longtrain.prompt.help import bases_of

    _pass_over_marks()
    _refuse_files(words or ())
    folder = asset_dir("recipes")
    names = [file.stem for file in sorted(folder.glob("*.yaml"))]
    own = own_folder(words or ())
    every = words is None or own is not None
    wanted = [name for name in names if every or any(name in word for word in words or ())]
    texts = list(words or ())
    for name in wanted:  # which grows: what a recipe builds on is read too
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
    """Have Hydra find the header of a YAML file behind a byte order mark, which some editors put before it.

    The file's keys it reads; `# @package` in the first line it would miss.
    """
    from dataclasses import replace

    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult, ConfigSource

    Plugins.instance()  # which brings the reader of files
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
def _list(recipe_folder: Path) -> None:
    """Name all recipes to the ConfigStore, which belongs to the process: once is enough."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    # Hydra copies all sources for each group that it lists, and again what it loads.
    vars(store)["__deepcopy__"] = lambda memo: store
    for file in recipe_folder.glob("*.yaml"):
        store.store(group="recipe", name=file.stem, node={}, package="_global_", provider=file.name)


@cache
def _list_method(name: str) -> None:
    """Name a method to the ConfigStore, once: its dataclass, once read, stays in this place."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="method", name=name, node={}, provider="longtrain.methods")


@cache
def _read_method(name: str) -> None:
    """Put a method's dataclass in its place in the ConfigStore."""
    from dataclasses import field, fields, make_dataclass

    from hydra.core.config_store import ConfigStore

    from longtrain import methods

    own = methods.config_class(name)
    # Hydra merges no mapping into a typed one that is null; `settings` checks its type all the same
    loose = [(f.name, Any, field(default=None)) for f in fields(own) if f.type == "dict[str, Any] | None"]
    schema = make_dataclass("Method", [*loose, ("name", str, field(default=name))], bases=(own,))
    ConfigStore.instance().store(group="method", name=name, node=schema, provider="longtrain.methods")


def _read(recipe_folder: Path, name: str, suite: str) -> None:
    """Put what a recipe says in its place.

    Args:
        recipe_folder: where it is.
        name: of the recipe.
        suite: that the command line chooses; empty: none.
    """
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
    """What a file says; reading is what takes time."""
    from omegaconf import OmegaConf

    return OmegaConf.load(file)


def _suite_keys(name: str) -> set[str]:
    """The keys of a suite that ships here, with those of what it builds on; none of another's."""
    from omegaconf import OmegaConf

    from longtrain.prompt.help import bases_of

    file = asset_dir("conf") / "suite" / f"{name}.yaml"
    if not name or not file.is_file():
        return set()
    own = set(OmegaConf.select(OmegaConf.load(file), "suite") or ())
    return own.union(*(_suite_keys(base) for base in bases_of(file.read_text(encoding="utf-8"))))


@contextmanager
def composed_once(words: Sequence[str]) -> Iterator[None]:
    """Spare Hydra a second composition, which is half of the time until a job's values are checked.

    By it Hydra learns whether the configuration itself asks for a sweep, as only files of the user's own and
    keys of Hydra's do; what `--multirun` asks for it knows without.
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
    """The folder of the user's own configuration files that a flag names; None: no flag does."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, _, value = word.partition("=")
        if flag in FOLDER_FLAGS:
            return Path(value or following)
    return None


def _refuse_files(words: Sequence[str]) -> None:
    """Refuse a recipe that is given by its path, and say where it is looked for.

    Raises:
        ConfigError: a word names a file.
    """
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
    """Refuse a chosen recipe of the user's own, a copy of one of ours perhaps, that lacks Hydra's mark."""
    for file in (own / "recipe").glob("*.yaml"):
        if f"+recipe={file.stem}" in words and "# @package _global_" not in file.read_text(encoding="utf-8"):
            raise ConfigError(f"{file} has no line '# @package _global_'; put it above all others")
