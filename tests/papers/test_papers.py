"""The papers' printed numbers: every file is well formed and speaks our language."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from fcl_bench.config import GROUPS
from fcl_bench.papers.printed import printed
from tests.conftest import REPOSITORY
from tests.papers.reading import printed_by
from tests.papers.settings import overrides

#: Of every file, text all of them.
COLUMNS = (
    *("table", "row", "column", "method", "metric", "value", "spread", "unit"),
    *("data", "backbone", "tasks", "clients", "beta", "setting"),
)
CONF = REPOSITORY / "conf"
PAPERS = sorted(file.parent.name for file in (REPOSITORY / "src/fcl_bench/papers").glob("*/printed.csv"))


def names(group: str) -> set[str]:
    return {file.stem for file in (CONF / group).glob("[!_]*.yaml")}


@cache
def keys(file: Path) -> set[str]:
    """Every key of a YAML file, dotted, the nodes above others included."""

    def walk(node: dict, prefix: str = ""):
        for key, value in node.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")

    return set(walk(yaml.safe_load(file.read_text())))


@cache
def known_key(key: str, method: str) -> bool:
    """Whether an override names a group, a key at the top, or one of a group's; of `method`'s own where it is ours."""
    group, _, knob = key.partition(".")
    if group not in GROUPS or not knob:
        return group in GROUPS or key in keys(CONF / "config.yaml")
    files = list((CONF / group).glob(f"{method or '*'}.yaml" if group == "method" else "*.yaml"))
    if any("defaults" in keys(file) for file in files):  # a file that starts from the knobs of all gradient methods
        files += (CONF / group).glob("_*.yaml")
    return any(knob in keys(file) for file in files)


@pytest.fixture(scope="module", params=PAPERS)
def frame(request):
    return printed_by(request.param)


def test_the_columns_are_those_that_are_promised(frame):
    assert [*frame] == [*COLUMNS, "paper", "number", "spread_number"]
    assert len(frame)
    for column in COLUMNS:
        assert frame[column].map(type).eq(str).all()
        assert (frame[column] == frame[column].str.strip()).all()
    for column in ("table", "row", "column", "metric", "value", "unit"):
        assert (frame[column] != "").all()


def test_no_cell_is_there_twice(frame):
    key = ["table", "row", "column", "metric", "setting"]
    assert not frame[frame.duplicated(key, keep=False)][key].to_dict("records")


def test_every_number_is_one(frame):
    for row in frame.itertuples():
        for text, number in ((row.value, row.number), (row.spread, row.spread_number)):
            digits = re.fullmatch(r"[+-]?\d[\d,]*(\.\d+)?", text)
            assert bool(digits) or text in ("", "n/a") or re.fullmatch(r"[<>] \d+(\.\d+)?", text)
            assert math.isnan(number) if digits is None else number == float(text.replace(",", ""))
    assert frame["tasks"].str.fullmatch(r"\d*").all()
    assert frame["clients"].str.fullmatch(r"\d*").all()
    assert frame["beta"].str.fullmatch(r"(\d+(\.\d+)?)?").all()


def test_percentages_and_their_spreads_are_in_range(frame):
    shares = frame[frame["unit"] == "%"]
    assert not ((shares["number"] > 100) | (shares["number"] < -100) | (shares["spread_number"] < 0)).any()


def test_every_name_is_ours(frame):
    for column in ("method", "data", "backbone"):
        assert set(frame[column]) - {""} <= names(column)


def test_every_setting_is_made_of_our_overrides(frame):
    for row in frame.drop_duplicates(["method", "setting"]).itertuples():
        for key, value in overrides(row.setting).items():
            assert known_key(key, row.method), (key, row.table, row.row)
            if key in GROUPS:
                assert value in names(key), (key, value, row.table, row.row)


def test_an_unknown_key_would_be_told():
    assert known_key("method.rank", "fedran")
    assert not known_key("method.rank", "stsa")
    assert known_key("method.training.lr", "")
    assert known_key("wire.dtype", "")
    assert not known_key("rounds", "")


def test_all_papers_come_one_after_the_other():
    everything = printed()
    assert list(dict.fromkeys(everything["paper"])) == PAPERS
    assert len(everything) == sum(len(printed_by(paper)) for paper in PAPERS)
    assert list(everything.index) == list(range(len(everything)))


def test_trailing_zeros_stay_and_bounds_are_no_numbers():
    stsa = printed_by("stsa")
    assert {"50.10", "44.60"} <= set(stsa["value"])
    assert stsa.loc[stsa["value"] == "> 10", "number"].isna().all()
    assert stsa.loc[stsa["value"] == "44.60", "number"].tolist() == [44.6]
