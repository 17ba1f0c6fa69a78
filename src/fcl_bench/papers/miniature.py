"""Which run in miniature stands for a printed number: the same cell of the experiment's other profile."""

from __future__ import annotations

import functools
import re

import pandas as pd

from fcl_bench.config import Settings
from fcl_bench.papers.experiments import experiments, grid_cells
from fcl_bench.papers.matching import STATED, setting_key, settings_of

NOTE = (
    "Ours in miniature (profile=quick): the same grid on the digits, with small M, rank and rounds, one seed. It shows"
    " that every cell runs; what differs from the printed numbers says nothing about the paper."
)


def stand_ins(cell: pd.Series, wanted: Settings) -> list[tuple[tuple[str, ...], Settings]]:
    """The overrides and settings of `profile=quick` for a printed number; several where the paper leaves a key open.

    Args:
        cell: the printed number; its own table's experiments come first, then any of its paper's.
        wanted: its setting in full.
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
