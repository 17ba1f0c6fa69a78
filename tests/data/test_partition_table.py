"""The table of `benchmarks/partitions.py`."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from benchmarks import partitions
from fcl_bench.composition import config_dir


def test_statistics_of_a_partition_by_hand():
    """Two tasks of two clients: 3 of class 0 and 1 of class 1 against 2 of class 1; all of class 5 against nothing."""
    shards = [[np.array([0, 0, 1, 0]), np.array([1, 1])], [np.array([5, 5]), np.array([], dtype=int)]]
    assert partitions.statistics(shards) == {
        "samples (min, median, max)": "0 2 4",
        "empty %": 25.0,
        "classes (min, median, max)": "1 1 2",
        "top class": round((0.75 + 1 + 1) / 3, 3),
        "distance": round((0.25 + 0.5 + 0) / 3, 3),  # the first task's shares are 1/2 and 1/2, the second's 1
    }


@pytest.mark.slow
def test_every_partition_is_in_the_table_and_what_is_refused_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(partitions, "SPLITS", (("tasks=5",), ("split=si_blurry", "tasks=2")))
    asked = ["data=digits", "--clients", "4", "400", "--betas", "0.1", "--out", str(tmp_path)]
    assert partitions.main([*asked, "--limit", "1000"]) == 0
    table = pd.DataFrame(json.loads((tmp_path / "partitions.json").read_text())["rows"])
    assert len(table) == 2 * 2 * (3 + 5)
    assert {name.split()[0] for name in table["partition"]} == {
        file.stem
        for file in config_dir().glob("partition/*.yaml")
        if file.stem != "given"  # which is of a file
    }
    refused = table[table["refused"].notna()]
    assert set(refused["partition"]) >= {"dirichlet", "dirichlet_all_classes"}
    assert refused["distance"].isna().all()
    assert table[table["refused"].isna()]["distance"].between(0, 1).all()
    assert "slowest preparation" in capsys.readouterr().out
    monkeypatch.setattr(partitions, "SPLITS", (("tasks=1",),))
    assert partitions.main(["data=digits", "--clients", "2", "--out", str(tmp_path), "--limit", "0"]) == 1
