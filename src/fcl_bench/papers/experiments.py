"""The grids of `experiment=...`: which runs a paper's table or figure is made of, in either profile."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from fcl_bench.config import config_dir
from fcl_bench.errors import require_choice
from fcl_bench.papers.profiles import PROFILES


def experiments() -> list[str]:
    """The names of all experiments, ascending."""
    return sorted(file.stem for file in config_dir().glob("experiment/*.yaml"))


def runs_of(experiment: str, profile: str = "full", typed: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """What `fcl-bench -m experiment=... profile=... typed...` runs: the overrides of each run, in its order.

    Args:
        experiment, profile: of `experiments()` and `PROFILES`.
        typed: further overrides, as on the command line: they replace the grid's values of the same key.

    Raises:
        UserError: no such experiment or profile.
    """
    require_choice("experiment", experiment, experiments())
    require_choice("profile", profile, PROFILES)
    grid = [f"{key}={value}" for key, value in _grids(experiment)[profile].items()]
    parsed = OverridesParser.create().parse_overrides([*grid, *typed])
    (runs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [(f"experiment={experiment}", f"profile={profile}", *run) for run in runs]


def cells_of(experiment: str, profile: str = "full") -> list[tuple[str, ...]]:
    """`runs_of`, of the first seed only: a cell is what is averaged over seeds.

    The cells of both profiles are in the same order, so that a run in miniature stands for a printed cell.
    """
    seeds = str(_grids(experiment)[profile].get("seed", 0))
    return runs_of(experiment, profile, [f"seed={seeds.partition(',')[0]}"])


@functools.cache
def _grids(experiment: str) -> dict[str, dict[str, str]]:
    """Both grids: key -> its values, with commas between them."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        grids: dict[str, dict[str, str]] = OmegaConf.to_object(compose("config", [f"experiment={experiment}"]).grid)  # type: ignore[assignment]
    return grids
