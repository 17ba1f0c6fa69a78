"""Reading tables anew: tab-separated lines under a caption, with headings above and names at the left."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import cache
from itertools import takewhile

import pandas as pd
import yaml
from omegaconf import DictConfig, OmegaConf

from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.papers.printed import printed
from tests.conftest import REPOSITORY
from tests.papers.settings import overrides

CONF = REPOSITORY / "conf"

#: TeX -> as our files have it.
SIGNS = {"\\alpha": "α", "\\Delta": "Δ", "\\gamma": "γ", "\\pm": "±", "\\uparrow": "↑", "\\downarrow": "↓"}

Cells = dict[tuple[str, str], str]


def printed_by(paper: str) -> pd.DataFrame:
    """The printed numbers of one paper."""
    return printed().query("paper == @paper").reset_index(drop=True)


def grid(text: str, caption: str) -> list[list[str]]:
    """The cells of the tab-separated lines below the one line that starts with `caption`."""
    lines = text.splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.startswith(caption)]
    while "\t" not in lines[start]:
        start += 1
        assert not lines[start].startswith("Table "), f"{caption} has no lines of its own"
    rows = [[plain(cell) for cell in line.split("\t")] for line in takewhile(lambda line: "\t" in line, lines[start:])]
    assert len({len(row) for row in rows}) == 1
    return rows


def plain(cell: str) -> str:
    """Without emphasis and the dollars of formulas."""
    for sign, ours in SIGNS.items():
        cell = cell.replace(sign, ours)
    cell = re.sub(r"</?[bu]>|\*\*|\$", "", cell)
    return re.sub(r"\( ", "(", re.sub(r" \)", ")", re.sub(r" +", " ", cell))).strip()


def cells(rows: list[list[str]], headings: int = 1, names: int = 1) -> Cells:
    """(names, headings) -> cell, both joined by " / ".

    A heading that spans several columns, and a name that spans several lines, stands once, over or before the first.

    Args:
        rows: see `grid`.
        headings: lines of headings.
        names: columns of names.
    """
    above = [filled(row[names:]) if line < headings - 1 else row[names:] for line, row in enumerate(rows[:headings])]
    paths = [" / ".join(filter(None, path)) for path in zip(*above, strict=True)]
    beside = list(zip(*(filled([row[n] for row in rows[headings:]]) for n in range(names)), strict=True))
    found = {
        (" / ".join(name), path): cell
        for name, row in zip(beside, rows[headings:], strict=True)
        for path, cell in zip(paths, row[names:], strict=True)
    }
    assert len(found) == len(paths) * len(beside)
    return found


def filled(row: list[str]) -> list[str]:
    """Each empty cell takes the last one before it that is not empty."""
    last, full = "", []
    for cell in row:
        last = cell or last
        full.append(last)
    return full


def as_typed(frame: pd.DataFrame, table: str) -> Cells:
    """(row, column) -> value and spread of one table of ours."""
    ours = frame[frame["table"] == table]
    found = {
        (row.row, row.column): f"{row.value} ± {row.spread}" if row.spread else row.value for row in ours.itertuples()
    }
    assert len(found) == len(ours)
    return found


def numbers(rows: list[list[str]], headings: int = 1, names: int = 1) -> int:
    """How many numbers there are beside the names and below the headings, whatever their cells."""
    return sum(len(re.findall(r"-?\d+(?:\.\d+)?", cell)) for row in rows[headings:] for cell in row[names:])


def numbers_typed(frame: pd.DataFrame, table: str) -> int:
    """The same count in one table of ours: values and spreads."""
    ours = frame[frame["table"] == table]
    return int(ours["number"].notna().sum() + ours["spread_number"].notna().sum())


def compose_all(frame: pd.DataFrame) -> int:
    """Compose every setting of the frame as a command line would; says how many there are.

    A method that is not here lends its place to fedavg: its knobs are those of training alone.

    Raises:
        UserError, hydra's and omegaconf's errors: a setting that a command line does not take.
    """
    frame = frame.assign(keys=frame["setting"].map(lambda setting: str(overrides(setting))))
    settings = frame.drop_duplicates(["method", "data", "backbone", "keys"])
    for row in settings.itertuples():
        config = deepcopy(kept())
        keys = {"method": row.method or "fedavg", "data": row.data, "backbone": row.backbone}
        keys |= {"tasks": row.tasks, "clients": row.clients, "beta": row.beta} | overrides(row.setting)
        for key, value in keys.items():
            if (CONF / key).is_dir():
                config[key] = deepcopy(kept(f"{key}={value}")[key])
            elif value:
                # Not merged, so that `method.tip=false` takes the place of a whole node.
                OmegaConf.update(config, key, yaml.safe_load(value), merge=False)
        load_settings(config)
    return len(settings)


@cache
def kept(*choice: str) -> DictConfig:
    """As `composed`, which is slow, while the settings are many combinations of few choices."""
    return composed(choice)
