"""Composing a command line with Hydra: what can be chosen, presets, the runs of a sweep, and old names of methods."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import re
from collections.abc import Iterable
from contextlib import nullcontext
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fcl_bench.config import GROUPS, YAML_LOADER

#: The arguments of this process's command that named folders with choices of one's own, which are in `FOLDERS`.
NAMED_BY: list[str] = []
log = logging.getLogger(__name__)
#: What the YAML of a method has that takes the knobs of training which all gradient methods share.
_TRAINS = re.compile(r"^defaults:.*_gradient", re.MULTILINE)

#: Old names of methods stay as aliases.
RENAMED = {"finetune": "fedavg", "joint": "centralised_ridge", "joint_training": "centralised"}


def composed(overrides: Iterable[str] = (), with_hydra: bool = False) -> DictConfig:
    """The configuration that Hydra composes from `overrides`, typed as after `fcl-bench`. Raises Hydra's own errors.

    What takes the time, choices, is composed once in a process, or again after a file in `FOLDERS` beside the package's
    own has changed; values are laid over a copy.

    Args:
        with_hydra: keep Hydra's own keys, below `hydra`; `hydra.runtime.choices` has the choice of each group.
    """
    typed, known = tuple(overrides), tuple(FOLDERS)
    files = [file for folder in FOLDERS[1:] for file in folder.rglob("*.yaml")]
    written = tuple((file, file.stat().st_mtime_ns) for file in sorted(files))
    read = [(*_read(text, known), text) for text in typed]
    # What adds, deletes or merges keys does so after the values before it.
    last = max((number for number, (kind, *_) in enumerate(read) if kind == "other"), default=-1)
    values = [one for number, one in enumerate(read) if one[0] == "value" and number > last]
    config = copy.deepcopy(_of_choices(tuple(one[-1] for one in read if one not in values), written, with_hydra))
    try:
        for _, key, value, _ in values:
            OmegaConf.update(config, key, value)
    except OmegaConfBaseException:
        return _of_choices(typed, written, with_hydra)  # which raises Hydra's error
    return config


@functools.lru_cache(maxsize=4096)
def _read(text: str, folders: tuple[Path, ...]) -> tuple[str, str, Any]:
    """Whether an override is a "choice" (or Hydra's own), a "value" of a key that is there, or "other"; key, value."""
    # Imported only here and below: not every command composes, and Hydra takes a while to load.
    from hydra.core.override_parser.overrides_parser import OverridesParser

    [override] = OverridesParser.create().parse_overrides([text])
    key, value = override.key_or_group, override.value()
    is_group = "/" in key or any((folder / key).is_dir() for folder in folders)
    if re.match(r"hydra(\.|$)", key) or override.is_sweep_override() or (is_group and not isinstance(value, dict)):
        return "choice", key, value
    is_plain = text[0] not in "+~" and override.package is None and not isinstance(value, dict)
    return "value" if is_plain else "other", key, value


@functools.lru_cache(maxsize=256)
def _of_choices(overrides: tuple[str, ...], written: tuple[tuple[Path, int], ...], with_hydra: bool) -> DictConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register(overrides)
    at_work = GlobalHydra.instance().is_initialized()  # as while it carries out a sweep
    with nullcontext() if at_work else initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=with_hydra)


def register(overrides: Iterable[str]) -> None:
    """Make known to Hydra what these overrides may choose and no file of its own has; call this before it composes."""
    # Only experiments have presets, and registering them takes as long as composing a run.
    if any("experiment" in override for override in overrides):
        register_presets()
    if any("track" in override for override in overrides):
        register_budgets()


@functools.cache
def register_presets() -> list[str]:
    """Make the presets in conf/experiment/settings choices of Hydra's group `experiment/preset`; their names.

    A preset says what a command line would: `group: choice` and `key: value`. Call this before Hydra composes.
    Launchers hand the choices on to their workers.
    """
    from hydra.core.config_store import ConfigStore

    names = []
    for file in sorted(config_dir().glob("experiment/settings/*.yaml")):
        for name, settings in yaml.load(file.read_text(), Loader=YAML_LOADER).items():
            chosen = {group: settings.pop(group) for group in GROUPS if group in settings}
            node = OmegaConf.create({"defaults": [{f"override /{group}": choice} for group, choice in chosen.items()]})
            for key, value in settings.items():
                OmegaConf.update(node, key, value)
            ConfigStore.instance().store(name, node, group="experiment/preset", package="_global_")
            names.append(name)
    return names


def register_budgets() -> None:
    """Make what each track gives to each method a choice of Hydra's, `track/NAME/METHOD`, which config.yaml takes.

    A track's YAML has it as `budget`: `training` is for every method with the knobs of `method/_gradient.yaml`; what
    stands under a method's name is for that one, over it. Call this before Hydra composes a track.
    """
    from hydra.core.config_store import ConfigStore

    trained = {name for name in choices_of("method") if _TRAINS.search(file_of("method", name).read_text())}
    for track in choices_of("track"):
        budget = _budget(track)
        for method in (trained | set(budget)) - {"training"}:
            node = OmegaConf.create()
            given = {**(budget.get("training", {}) if method in trained else {}), **budget.get(method, {})}
            for key, value in given.items():
                OmegaConf.update(node, key, value)
            ConfigStore.instance().store(method, node, group=f"track/{track}", package="_global_")


def _budget(track: str) -> dict[str, dict[str, Any]]:
    """The `budget` of a track's YAML over those of the tracks that its defaults name."""
    written = yaml.load(file_of("track", track).read_text(), Loader=YAML_LOADER)
    found: dict[str, dict[str, Any]] = {}
    for below in [entry for entry in written.get("defaults", ()) if entry in choices_of("track")]:
        found |= _budget(below)
    return found | written.get("budget", {})


def combinations(overrides: Iterable[str]) -> list[tuple[str, ...]]:
    """The runs of `fcl-bench -m overrides...`, in the order of Hydra's own sweeper: the overrides of each.

    The last of several overrides of one key counts. Hydra's errors pass through for what is not key=value or a list of
    values.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    hydra = GlobalHydra.instance()
    # It knows the choices of `method=glob(*)`.
    parser = OverridesParser.create(hydra.config_loader() if hydra.is_initialized() else None)
    axes: dict[str, list[str]] = {}
    for override in parser.parse_overrides(list(overrides)):
        key, swept = override.get_key_element(), override.is_sweep_override()
        values = override.sweep_string_iterator() if swept else [override.get_value_element_as_str()]
        axes[key] = [f"{key}={value}" for value in values]
    return list(itertools.product(*axes.values()))


def config_dir() -> Path:
    """fcl-bench's own folder of YAML files: inside the installed package, or at the top of a source checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def file_of(group: str, name: str) -> Path:
    """The YAML of a choice, or of what choices share; Hydra, too, looks in the folders in this order."""
    files = [folder / group / f"{name}.yaml" for folder in FOLDERS]
    return next((file for file in files if file.is_file()), files[0])


@functools.cache
def installed() -> tuple[Path, ...]:
    """The folders `conf` of installed packages that the entry points of `fcl_bench.choices` name.

    The packages are not imported: a broken one breaks only the runs that choose something of it.
    """
    names = sorted({point.module.partition(".")[0] for point in entry_points(group="fcl_bench.choices")})
    specs = [spec for name in names if (spec := find_spec(name))]
    folders = [Path(place, "conf") for spec in specs for place in spec.submodule_search_locations or ()]
    return tuple(folder for folder in folders if folder.is_dir())


#: The folders of YAML files in the order in which Hydra looks for a choice.
FOLDERS = [config_dir(), *installed()]


def groups() -> list[str]:
    """The names of all groups except Hydra's own, ascending."""
    return sorted(entry.name for entry in config_dir().iterdir() if entry.is_dir() and entry.name != "hydra")


def choices_of(group: str) -> list[str]:
    """The choices of a group, ascending; it also works for `experiment/preset` and Hydra's own groups.

    A file whose name begins with "_" is what several choices share, and none itself.
    """
    if group == "experiment/preset":
        return register_presets()
    return sorted({file.stem for folder in FOLDERS for file in (folder / group).glob("[!_]*.yaml")})


def current(arguments: Iterable[str]) -> list[str]:
    """The arguments of a command with today's names of methods; each that changes is logged in one line."""
    made = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key.lstrip("+") == "method":
            value = re.sub(r"\w+", lambda word: RENAMED.get(word[0], word[0]), value)
        new = key + equals + value
        if new != argument:
            log.warning("%s is now %s", argument, new)
        made.append(new)
    return made
