"""What the config.yaml of a run says, also where the run is older than some keys of today."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import yaml

from fcl_bench.config import GROUPS, YAML_LOADER, Wire, added_knobs, target_class
from fcl_bench.errors import UserError

log = logging.getLogger(__name__)

#: What every run did before there were these groups.
_GROUPS_BEFORE = {
    "faults": {"_target_": "fcl_bench.engine.faults.base.NoFaults"},
    "transport": {"_target_": "fcl_bench.engine.transports.in_process.InOneProcess"},
    "noise": {"_target_": "fcl_bench.engine.noise.base.NoNoise"},
    "secure": {"_target_": "fcl_bench.engine.secure.base.NoSecurity"},
}


def resolved_config(path: Path) -> dict[str, Any]:
    """A run's config.yaml; a group or a knob that is newer than the run is there, with what all runs had before it.

    It holds no interpolation, so it needs no OmegaConf.
    """
    config = {**_GROUPS_BEFORE, **yaml.load(path.read_text(), Loader=YAML_LOADER)}
    for group in GROUPS:
        if isinstance(node := config.get(group), dict):
            config[group] = _filled(node, _added(group, str(node.get("_target_"))))
    if isinstance(wire := config.get("wire"), dict):
        config["wire"] = _filled(wire, added_knobs(Wire))
    return config


@functools.cache
def _added(group: str, path: str) -> dict[str, Any]:
    """The newer knobs of the class that a group names; none of a class that is here no more."""
    try:
        return added_knobs(target_class(group, path))
    except (UserError, ImportError) as error:
        log.debug("%s", error)
        return {}


def _filled(node: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """`node`, and what it lacks of `added` at its end; of a part of `added` only where `node` has that part."""
    found = dict(node)
    for key, value in added.items():
        if not isinstance(value, dict):
            found.setdefault(key, value)
        elif isinstance(part := node.get(key), dict):
            found[key] = _filled(part, value)
    return found
