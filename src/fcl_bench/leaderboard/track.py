"""A track: the stream, the partition and the budget that all rows of one leaderboard share."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fcl_bench.cli.overrides import composed_as_typed
from fcl_bench.composition import choices_of, composed, file_of
from fcl_bench.config import Settings, load_settings
from fcl_bench.data.sources.base import loaded
from fcl_bench.errors import require_choice
from fcl_bench.files import json_hash
from fcl_bench.tracking import flat

#: A row's method as it is, or with the values that a search chose on validation samples.
DEFAULTS, TUNED = "defaults", "tuned"


@dataclass(frozen=True)
class Track:
    """What conf/track/NAME.yaml says.

    Attributes:
        name: of the file.
        version: what runs of the track are recorded with, such as "features-1".
        about: the file's first line.
        settings: the values that vary beside the seed, as typed: {"clients": "5", "beta": "0.1"}, ...
        seeds: of every row.
        typed: the user's own overrides, such as "data.path=FILE".
    """

    name: str
    version: str
    about: str
    settings: list[dict[str, str]]
    seeds: list[int]
    typed: list[str]

    def overrides(self, method: str, knobs: Mapping[str, str], setting: Mapping[str, str]) -> list[str]:
        """What one types for a run but for its seed."""
        return overrides(self.name, method, knobs, setting, self.typed)


def overrides(
    track: str, method: str, knobs: Mapping[str, str], setting: Mapping[str, str], typed: Iterable[str]
) -> list[str]:
    """What one types for a run but for its seed; the user's own overrides come last, so they win."""
    keys = {"track": track, "method": method, **setting, **knobs}
    return [*(f"{key}={value}" for key, value in keys.items()), *typed]


def read_track(name: str, typed: list[str]) -> Track:
    """Read a track. Raises a `UserError` for a name that is none.

    Args:
        name: a choice of the group `track`.
        typed: overrides of all its runs.
    """
    require_choice("track", name, choices_of("track"))
    config = composed([f"track={name}"])
    grid = {key: str(values).split(",") for key, values in config.grid.full.items()}
    seeds = [int(seed) for seed in grid.pop("seed", ["0"])]
    settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    about = _first_line("track", name)
    return Track(name, str(config.track), about, settings, seeds, typed)


def title_of(method: str) -> str:
    """The name of a method in tables, which is in front of the colon in the first line of its YAML."""
    return _first_line("method", method).partition(":")[0].partition(",")[0].removesuffix(" on each task in turn")


def family_of(method: str) -> str:
    """The package of a method's class, as in src/fcl_bench/methods: closed_form, averaging, ..."""
    target = re.search(r"^_target_: *([\w.]+)", file_of("method", method).read_text(), re.MULTILINE)
    return target[1].split(".")[-3] if target and target[1].count(".") > 1 else "other"


def without_paths(typed: Iterable[str]) -> list[str]:
    """Overrides without the paths of this machine, which are of no use to a reader."""
    paths = ("data.path", "backbone.checkpoint")
    return [f"{key}=FILE" if (key := text.partition("=")[0]) in paths else text for text in typed]


def settings_of(overrides: list[str]) -> Settings:
    """The settings of a command line. Raises a `UserError` with the command's own message."""
    return load_settings(composed_as_typed(overrides))


def fingerprint_of(overrides: list[str]) -> str:
    """The fingerprint of a command line's data. Raises a `UserError` if they cannot be read."""
    return loaded(settings_of(overrides).data).fingerprint


def request_of(settings: Settings) -> str:
    """A hash of everything that determines a result but the data: the same for a row that is there already."""
    return json_hash(settings.identity())[:12]


def shared_of(settings: Settings) -> dict[str, Any]:
    """What all methods of a track share in one setting: nested keys with dots -> value; no method, no seed."""
    identity = {key: value for key, value in settings.identity().items() if key not in ("method", "seed")}
    return flat(identity, separator=".")


def _first_line(group: str, name: str) -> str:
    lines = (line for line in file_of(group, name).read_text().splitlines() if line.startswith("# "))
    return next((line.removeprefix("# ") for line in lines if not line.startswith("# @package")), name)
