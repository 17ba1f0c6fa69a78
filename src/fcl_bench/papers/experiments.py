"""The grids of `experiment=...`: the runs behind a paper's table or figure, in either profile.

A run in miniature stands for a printed number if it is the same cell of the experiment's other profile.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import pandas as pd
from omegaconf import OmegaConf

from fcl_bench.composition import combinations, composed, config_dir
from fcl_bench.config import Settings
from fcl_bench.errors import require_choice
from fcl_bench.papers.matching import STATED, setting_key, settings_of

#: The sizes in which an experiment can be run: a paper's own settings, or the same grid in miniature.
PROFILES = ("full", "quick")
MINIATURE = (
    "Ours in miniature (profile=quick): the same grid on the digits, with small M, rank and rounds, one seed. It shows"
    " that every cell runs; what differs from the printed numbers says nothing about the paper."
)


def experiments() -> list[str]:
    """Return the names of all experiments, ascending."""
    return sorted(file.stem for file in config_dir().glob("experiment/*.yaml"))


def runs_of(experiment: str, profile: str = "full", typed: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return the overrides of each run of `fcl-bench -m experiment=... profile=... typed...`, in its order.

    Args:
        experiment, profile: of `experiments()` and `PROFILES`.
        typed: further overrides, as on the command line: they replace the grid's values of the same key.

    Raises:
        UserError: no such experiment or profile.
    """
    require_choice("experiment", experiment, experiments())
    require_choice("profile", profile, PROFILES)
    grid = [f"{key}={value}" for key, value in _grids(experiment)[profile].items()]
    return [(f"experiment={experiment}", f"profile={profile}", *run) for run in combinations([*grid, *typed])]


@functools.cache  # every printed number is looked for in all cells
def grid_cells(experiment: str, profile: str = "full") -> tuple[tuple[str, ...], ...]:
    """Like `runs_of`, but for the first seed only: a cell is what is averaged over seeds.

    The cells of both profiles are in the same order, so that a run in miniature stands for a printed cell.
    """
    seeds = str(_grids(experiment)[profile].get("seed", 0))
    return tuple(runs_of(experiment, profile, [f"seed={seeds.partition(',')[0]}"]))


@functools.cache
def _grids(experiment: str) -> dict[str, dict[str, str]]:
    """Return both grids: key -> its comma-separated values."""
    return OmegaConf.to_object(composed([f"experiment={experiment}"]).grid)  # type: ignore[return-value]


def stand_ins(cell: pd.Series, wanted: Settings) -> list[tuple[tuple[str, ...], Settings]]:
    """Return overrides and settings of `profile=quick` for a printed number; several if the paper leaves a key open.

    Args:
        cell: the printed number; its own table's experiments come first, then any of its paper's.
        wanted: the number's full setting.
    """
    left_open = frozenset(key for key in STATED if not cell[key])
    key = setting_key(wanted, left_open)
    names = [name for name in experiments() if name.startswith(f"{cell['paper']}_")]
    table = re.sub(r"\W", "", cell["table"].lower())
    for chosen in ([name for name in names if name.split("_", 1)[1].startswith(table)], names):
        found = {
            quick: settings_of(quick)
            for name in chosen
            for full, quick in zip(grid_cells(name, "full"), grid_cells(name, "quick"), strict=True)
            if _full_key(full, left_open) == key
        }
        if found:
            return list(found.items())
    return []


@functools.cache
def _full_key(overrides: tuple[str, ...], left_open: frozenset[str]) -> str:
    return setting_key(settings_of(overrides), left_open)
