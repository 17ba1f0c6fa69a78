"""The grids of `experiment=...`: the runs behind a paper's table or figure, in either profile."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from omegaconf import OmegaConf

from fcl_bench.composition import combinations, composed, config_dir
from fcl_bench.errors import require_choice

#: The sizes in which an experiment can be run: a paper's own settings, or the same grid in miniature.
PROFILES = ("full", "quick")


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


@functools.cache  # who compares the grids asks for each many times
def grid_cells(experiment: str, profile: str = "full") -> tuple[tuple[str, ...], ...]:
    """Like `runs_of`, but for the first seed only: a cell is what is averaged over seeds.

    The cells of both profiles are in the same order.
    """
    seeds = str(_grids(experiment)[profile].get("seed", 0))
    return tuple(runs_of(experiment, profile, [f"seed={seeds.partition(',')[0]}"]))


@functools.cache
def _grids(experiment: str) -> dict[str, dict[str, str]]:
    """Return both grids: key -> its comma-separated values."""
    return OmegaConf.to_object(composed([f"experiment={experiment}"]).grid)  # type: ignore[return-value]
