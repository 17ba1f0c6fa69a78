"""afl.csv against a second reading of AFL's text: its tables are tab-separated lines there."""

from __future__ import annotations

import re

import pytest

from tests.conftest import shared
from tests.papers.reading import Cells, as_typed, cells, compose_all, grid, numbers, numbers_typed, printed_by
from tests.papers.settings import overrides

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "Tiny-ImageNet": "tiny_imagenet"}
BACKBONES = {"ResNet-18": "resnet18_afl", "VGG11": "vgg11_afl", "ViT-B-16": "vit_b16_afl"}
#: Columns of names at the left of each table.
NAMES = {"Table 1": 2, "Table 2": 1, "Table 3": 1, "Table 4": 1}


@pytest.fixture(scope="module")
def text() -> str:
    return shared("papers/afl.txt").read_text()


@pytest.fixture(scope="module")
def frame():
    return printed_by("afl")


def reading(text: str, table: str) -> Cells:
    """(row, column) -> cell, as our file lays the table out."""
    found = cells(grid(text, f"{table}. "), names=NAMES[table])
    if table == "Table 1":  # methods are its columns
        return {(method, setting): cell for (setting, method), cell in found.items()}
    if table == "Table 3":  # two numbers a cell
        return {
            (K, f"{gamma} / {side} RI"): value.replace("N/A", "n/a")
            for (K, gamma), cell in found.items()
            for side, value in zip(("w/o", "w/"), cell.split(), strict=True)
        }
    return found


@pytest.mark.parametrize("table", NAMES)
def test_every_cell_is_there_as_printed_and_nothing_else(frame, text, table):
    assert as_typed(frame, table) == reading(text, table)


@pytest.mark.parametrize("table", NAMES)
def test_as_many_numbers_as_in_the_text(frame, text, table):
    assert numbers_typed(frame, table) == numbers(grid(text, f"{table}. "), names=NAMES[table]) > 0


def test_no_other_table(frame):
    assert set(frame["table"]) == set(NAMES)


def test_data_and_backbone_are_the_headings(frame):
    for row in frame.itertuples():
        named = [word for word in row.column.split(" / ") if word in DATA]
        # Tables 2 and 3 are CIFAR-100's: the text says so of the one, and both have its 58.56 %.
        assert row.data == (DATA[named[0]] if named else "cifar100")
        assert row.backbone == BACKBONES.get(row.row, "resnet18_afl")


def test_the_partition_is_the_heading(frame):
    for row in frame.itertuples():
        keys = overrides(row.setting)
        where = row.column if row.table != "Table 3" else "α = 0.1"
        alpha, shards = (re.search(rf"{sign} = ([\d.]+)", where) for sign in "αs")
        assert row.beta == (alpha[1] if alpha else "")
        assert keys.get("partition.shards") == (shards[1] if shards else None)
        kind = "dirichlet" if alpha else "shards" if shards else "iid" if "IID" in where else None
        assert keys.get("partition") == kind
        assert kind or row.table == "Table 4"


def test_clients_and_regulariser_are_those_of_the_text(frame, text):
    assert "we use 100 clients for each method" in text
    assert "Here, we fix the client number to 100" in text
    assert "a $\\gamma = 1$ RI process" in text
    assert "with $\\alpha = 0.1$ and $K = 100, 500, 1000$" in text
    for row in frame.itertuples():
        keys = overrides(row.setting)
        gamma = re.search(r"γ = ([\d.]+)", row.column)
        assert row.clients == {"Table 3": row.row.removeprefix("K="), "Table 4": ""}.get(row.table, "100")
        assert row.tasks == "1"
        if row.method:
            assert float(keys["method.gamma"]) == float(gamma[1] if gamma else 1)
            assert keys["method.ri"] == ("false" if "w/o" in row.column else "true")


def test_only_afl_is_ours_and_a_baseline_shows_its_best_round(frame, text):
    assert "standard deviation of the best top-1 classification accuracy during training" in text
    afl = (frame["row"] == "AFL") | frame["table"].isin(["Table 3", "Table 4"])
    assert (frame["method"] == afl.map({True: "afl", False: ""})).all()
    assert (frame["metric"] == afl.map({True: "A_T", False: "best accuracy over rounds"})).all()


def test_a_command_line_takes_every_setting(frame):
    assert compose_all(frame) > 30


def test_numbers_that_the_text_repeats(frame, text):
    value = frame.set_index(["table", "row", "column"])["value"]
    for sentence, found in {
        "FedAvg (56.62% \\rightarrow 32.99%)": [
            value["Table 1", "FedAvg", f"CIFAR-100 / α = {a}"] for a in ("0.1", "0.01")
        ],
        "73.50% \\rightarrow 64.07%": [value["Table 1", "FedDyn", f"CIFAR-10 / s = {s}"] for s in (4, 2)],
        "58.56\\% \\rightarrow 49.62\\%": [value["Table 3", "K=1000", f"γ = 100 / {s} RI"] for s in ("w/", "w/o")],
    }.items():
        assert sentence in text
        assert re.findall(r"\d+\.\d+", sentence) == found
