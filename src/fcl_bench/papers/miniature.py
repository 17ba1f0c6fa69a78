"""Which run in miniature stands for a printed number: the same cell of the experiment's other profile."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Container, Iterator

import pandas as pd

from fcl_bench.config import Settings
from fcl_bench.papers.experiments import experiments, grid_cells
from fcl_bench.papers.matching import STATED, comparable, settings_of

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
    left_open = {key for key in STATED if not cell[key]}
    own = re.sub(r"\W", "", f"{cell['table']}".lower())
    names = [name for name in experiments() if name.startswith(f"{cell['paper']}_")]
    for chosen in ([name for name in names if name.split("_", 1)[1].startswith(own)], names):
        found = dict(_matching(tuple(chosen), _key(wanted, left_open), frozenset(left_open)))
        if found:
            return list(found.items())
    return []


def _matching(
    names: tuple[str, ...], key: str, left_open: frozenset[str]
) -> Iterator[tuple[tuple[str, ...], Settings]]:
    for name in names:
        for full, quick in zip(grid_cells(name, "full"), grid_cells(name, "quick"), strict=True):
            if _full_key(full, left_open) == key:
                yield quick, settings_of(quick)


@functools.cache
def _full_key(overrides: tuple[str, ...], left_open: frozenset[str]) -> str:
    return _key(settings_of(overrides), left_open)


def _key(settings: Settings, left_open: Container[str]) -> str:
    """A setting's identity as text, without what does not count or is left open."""
    kept = {key: value for key, value in comparable(settings).items() if key not in left_open}
    return json.dumps(kept, sort_keys=True, default=str)
