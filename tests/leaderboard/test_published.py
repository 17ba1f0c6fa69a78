"""The published rows: the tables of the docs are theirs, and the rows agree with each other."""

from __future__ import annotations

import pytest

from benchmarks.leaderboard_page import PAGES, written
from benchmarks.leaderboard_runs import records
from fcl_bench.leaderboard.store import published, stored

TRACKS = sorted(file.stem for file in published().glob("*.csv"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_rows(page):
    text = page.read_text()
    assert "<!-- features: " in text
    assert written(text) == text, "python -m benchmarks.leaderboard_page writes them"


@pytest.mark.parametrize("track", TRACKS)
def test_each_run_is_there_once_and_its_last_accuracy_is_a_t(track):
    store = stored(track, published())
    keys = [
        (row["method"], row["kind"], *(row[key] for key in store.about["settings"][0]), row["seed"])
        for row in store.rows
    ]
    assert len(keys) == len(set(keys))
    assert len({row["run_id"] for row in store.rows if row["kind"] == "defaults"}) == sum(
        row["kind"] == "defaults" for row in store.rows
    )
    for row in store.rows:
        assert row["accuracy"][-1] == pytest.approx(row["A_T"])
        assert row["A_avg"] == pytest.approx(sum(row["accuracy"]) / len(row["accuracy"]))
        assert not row["git_commit"].endswith("dirty")


@pytest.mark.parametrize("track", TRACKS)
def test_each_row_is_what_its_packed_run_says(track):
    store, runs = stored(track, published()), dict(records(track))
    assert {row["run_id"] for row in store.rows} == runs.keys()
    for row in store.rows:
        record = runs[row["run_id"]]
        assert (record["run_id"], record["track"]) == (row["run_id"], store.about["version"])
        assert record["data_fingerprint"] == store.about["data"]
        assert record["metrics"]["A_T"] == pytest.approx(row["A_T"])
        assert record["metrics"]["accuracy"] == pytest.approx(row["accuracy"])
        assert row["run_id"] in store.answers
