"""Hydra without the work that it repeats: composing takes a quarter of the time of tests of runs and commands."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from fcl_bench.composition import config_dir

_load, _choices = ConfigRepository.load_config, defaults_list._create_interpolation_map
_list, _put_together = defaults_list._create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
#: What Hydra has parsed in this process.
_LOADED: dict[tuple[str | int, ...], bytes] = {}
#: The files that some choices stand for, and what these files make together.
_LISTED: dict[str, bytes] = {}
_TOGETHER: dict[str, bytes] = {}
#: Where files stay as they are; folders of a test's own may change.
_LASTING = {"pkg://hydra.conf", f"file://{config_dir()}", "structured://"}


def hasten() -> None:
    """From now on Hydra composes the same in less time."""
    # It copies the store of all presets for each composition.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    ConfigRepository.load_config = _load_once  # type: ignore[method-assign]
    defaults_list._create_interpolation_map = _choices_if_needed
    defaults_list._create_defaults_list = _list_once
    ConfigLoaderImpl._compose_config_from_defaults_list = _put_together_once  # type: ignore[method-assign]
    # It composes everything once more to look up hydra.mode, which the command refuses.
    Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]


def _load_once(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Parse a file once in a process, and again after it has changed."""
    sources = [source.path for source in self.get_sources()]
    name = f"{config_path.removesuffix('.yaml')}.yaml"
    changed = [file.stat().st_mtime_ns for path in sources if (file := Path(path, name)).is_file()]
    key = (config_path, *sources, *changed)
    if key in _LOADED:
        return pickle.loads(_LOADED[key])
    found = _load(self, config_path)
    if found is not None and found.path.startswith(("file:", "pkg:")):  # the store of presets may change
        _LOADED[key] = pickle.dumps(found)
    return found


def _lasting(repo: Any) -> bool:
    return {source.full_path() for source in repo.get_sources()} <= _LASTING


def _list_once(repo: Any, config_name: str | None, overrides: Any, prepend_hydra: bool, skip_missing: bool) -> Any:
    """Look the same choices up once in a process."""
    if not _lasting(repo):
        return _list(repo, config_name, overrides, prepend_hydra, skip_missing)
    own = overrides.config_overrides
    chosen = (overrides.override_choices, overrides.append_group_defaults, overrides.deletions)
    key = repr((config_name, chosen, prepend_hydra, skip_missing))
    if key not in _LISTED:
        found = _list(repo, config_name, overrides, prepend_hydra, skip_missing)
        _LISTED[key] = pickle.dumps((found, {**vars(overrides), "config_overrides": None}))
    found, state = pickle.loads(_LISTED[key])
    vars(overrides).update(state, config_overrides=own)
    return found


def _put_together_once(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
    """Put the same files together once in a process."""
    if not _lasting(repo):
        return _put_together(self, defaults, repo)
    key = str(defaults)
    if key not in _TOGETHER:
        _TOGETHER[key] = pickle.dumps(_put_together(self, defaults, repo))
    return pickle.loads(_TOGETHER[key])


def _choices_if_needed(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Collect all choices for a file only if its defaults refer to some."""
    return _choices(overrides, defaults, self_added) if any(d.is_interpolation() for d in defaults) else None
