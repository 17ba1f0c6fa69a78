"""Reading a run's config.yaml, also if the run is older than some of today's keys."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import yaml

from fcl_bench.config import GROUPS, YAML_LOADER, Wire, added_knobs, target_class
from fcl_bench.errors import UserError

log = logging.getLogger(__name__)

#: The start of `adapt._target_` in older runs, and its name today.
_MOVED = ("fcl_bench.runs.", "fcl_bench.execution.")
#: The behaviour of every run before these groups existed.
_GROUPS_BEFORE = {
    "faults": {"_target_": "fcl_bench.options.faults.base.NoFaults"},
    "transport": {"_target_": "fcl_bench.engine.transports.in_process.InOneProcess"},
    "noise": {"_target_": "fcl_bench.options.noise.base.NoNoise"},
    "secure": {"_target_": "fcl_bench.options.secure.base.NoSecurity"},
}


def resolved_config(path: Path) -> dict[str, Any]:
    """A run's config.yaml; groups and knobs newer than the run are filled in with the behaviour of runs before them.

    The file holds no interpolation, so OmegaConf is not needed.
    """
    config = {**_GROUPS_BEFORE, **yaml.load(path.read_text(), Loader=YAML_LOADER)}
    for group in GROUPS:
        if isinstance(node := config.get(group), dict):
            node = _of_today(node)
            config[group] = _filled(node, _added(group, str(node.get("_target_"))))
    if isinstance(wire := config.get("wire"), dict):
        config["wire"] = _filled(wire, added_knobs(Wire))
    return config


def _of_today(node: dict[str, Any]) -> dict[str, Any]:
    """`node` with the path that its class has today."""
    target = str(node.get("_target_"))
    return {**node, "_target_": target.replace(*_MOVED, 1)} if target.startswith(_MOVED[0]) else node


@functools.cache
def _added(group: str, path: str) -> dict[str, Any]:
    """The newer knobs of the class that a group names; none if the class no longer exists."""
    try:
        return added_knobs(target_class(group, path))
    except (UserError, ImportError) as error:
        log.debug("%s", error)
        return {}


def _filled(node: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """`node` with missing keys of `added` at its end; nested keys of `added` only if `node` has their mapping."""
    found = dict(node)
    for key, value in added.items():
        if not isinstance(value, dict):
            found.setdefault(key, value)
        elif isinstance(part := node.get(key), dict):
            found[key] = _filled(part, value)
    return found
