"""Measures of single tasks: S_3 in the frame, in fcl-tables and beside a printed number of AFCL's tables."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest

from fcl_bench.cli.tables import main
from fcl_bench.papers.tables import paper_tables
from fcl_bench.results.collect import collect, selected
from fcl_bench.results.measures import MEASURES, SERIES, by_task, direction, measure_named
from fcl_bench.results.summarise import setting, summarise, used_runs
from tests.results.frames import real_runs
from tests.small_runs import run_in

NAMES = ["S_2", "P_1", "P_2", "R_2", "A_1", "cumulative_seconds_1", "S_1", "S_7"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two seeds of two tasks."""
    return real_runs(tmp_path_factory.mktemp("out"))


def records(folder, frame):
    return [json.loads((folder / "runs" / name / "run.json").read_text()) for name in frame["folder"]]


def test_names_are_a_letter_and_a_task_from_1():
    assert (by_task("S_3").last, by_task("S_3").task) == ("S_T", 3)
    assert (by_task("cumulative_seconds_10").last, by_task("cumulative_seconds_10").task) == ("cumulative_seconds", 10)
    for none in ("S_0", "S_03", "S_T", "S_", "T_3", "S_3x", "up_max_mib", "A_avg_3", "seconds_per_task_3", "x S_3"):
        assert by_task(none) is None
    assert not [name for name in MEASURES if by_task(name)]


def test_a_task_has_the_directions_and_places_of_the_last():
    for last in SERIES:
        name = f"{last.removesuffix('_T')}_4"
        single, whole = measure_named(name), MEASURES[last]
        assert (single.higher, single.plain, single.section) == (whole.higher, whole.plain, whole.section)
        assert single.header != whole.header
        assert "4" in single.header
    assert measure_named("S_4").header == "S_4, stability (%)"
    assert direction("task_aware.P_4").higher
    assert not direction("cumulative_seconds_4").higher
    assert measure_named("S_0") is direction("S_0") is None


def test_columns_are_the_entries_of_the_record_and_are_no_configuration(finished):
    frame = collect(finished / "runs", NAMES)
    for (_, row), record in zip(frame.iterrows(), records(finished, frame), strict=True):
        metrics = record["metrics"]
        assert row["S_2"] == row["S_T"] == metrics["stability_by_task"][1]
        assert [row["P_1"], row["P_2"]] == metrics["plasticity_by_task"]
        assert row["P_2"] == row["P_T"]
        assert row["R_2"] == row["R_T"] == row["retention"] == metrics["retention_by_task"][1]
        assert row["A_1"] == metrics["accuracy"][0]
        seconds = record["runtime"]["cumulative_seconds"]
        assert [row["cumulative_seconds_1"], row["cumulative_seconds"]] == seconds
        assert seconds[1] > seconds[0] > 0
        # Nothing is before the first task, and there is no seventh.
        assert np.isnan(row["S_1"])
        assert np.isnan(row["S_7"])
    summary = summarise(used_runs(frame))
    assert len(summary) == 1
    assert summary["S_2_mean"].item() == pytest.approx(frame["S_2"].mean())
    assert not [column for column in setting(summary) if "_2" in column or "_1" in column]
    assert len(selected(frame, ["seed=0"])) == 1
    assert list(collect(finished / "runs").columns) == [column for column in frame if column not in NAMES]


def test_fcl_tables_shows_them(finished, in_process):
    tables = partial(in_process, main, "fcl-tables")
    code, out, err = tables("--out", finished, "--metrics", "S_2,P_2,stability,S_9", "--name", "tasks")
    assert (code, err) == (0, "")
    written = pd.read_csv(finished / "tables" / "tasks.accuracy.csv")
    frame = collect(finished / "runs", ["P_2"])
    assert written["P_2_mean"].item() == pytest.approx(frame["P_2"].mean())
    assert written["S_9_mean"].item() == "not defined"
    assert "S_2, stability (%)" in out
    code, _, err = tables("--out", finished, "--metrics", "S_2,S_x")
    assert code == 2
    assert "--metrics=S_x is not known" in err


@pytest.mark.slow_cases("task_aware.S_2-task_aware")
@pytest.mark.parametrize(("metric", "part"), [("S_2", "metrics"), ("task_aware.S_2", "task_aware")])
def test_a_printed_number_of_one_task_is_compared_with_it(finished, metric, part):
    cell = {"paper": "made up", "table": "Table F.4", "row": "FedRAN", "column": "task 2", "method": "fedran"}
    cell |= {"metric": metric, "value": "90.00", "spread": "", "unit": "%", "data": "digits", "backbone": "pixels"}
    cell |= {"tasks": "2", "clients": "2", "beta": "", "setting": "method.M=32 method.rank=8"}
    runs = used_runs(collect(finished / "runs"))
    cells = pd.DataFrame([{**cell, "number": 90.0, "spread_number": np.nan}])
    [table] = paper_tables(cells, runs, finished / "runs")
    [ours] = table.values.filter(regex="^ours.* mean$").iloc[0]
    found = [record[part]["stability_by_task"][1] for record in records(finished, runs)]
    assert ours == pytest.approx(np.mean(found))


@pytest.mark.slow
def test_what_is_sent_and_named_after_each_task_stands_beside_fedprotips_tables(tmp_path):
    """Tables 9 and 14: sizes of a stage, of one round for the model, and shares; of the record and uploads.csv."""
    small = ("trains=features", "frozen_stages=0", "columns=8", "training.rounds=3", "training.epochs=1")
    run_in(tmp_path, "method=fedprotip", *(f"method.{knob}" for knob in small), "tasks=2", "clients=2")
    runs = used_runs(collect(tmp_path / "runs"))
    [record] = records(tmp_path, runs)
    common = {"paper": "made up", "table": "Table 9", "row": "Base", "method": "fedprotip", "value": "1", "spread": ""}
    common |= {"data": "digits", "backbone": "pixels", "tasks": "2", "clients": "2", "beta": "", "number": 1.0}
    common |= {"setting": " ".join(f"method.{knob}" for knob in small), "spread_number": np.nan}
    metrics = [f"{stage}_mib_{task}" for stage in ("model", "bases", "references") for task in (1, 2)] + ["routing_2"]
    cells = [{**common, "metric": m, "column": m, "unit": "share" if m == "routing_2" else "MB"} for m in metrics]
    [table] = paper_tables(pd.DataFrame(cells), runs, tmp_path / "runs")
    ours = table.values.set_index("metric").filter(regex="^ours.* mean$").iloc[:, 0]
    uploads = pd.read_csv(tmp_path / "runs" / runs["folder"][0] / "uploads.csv")
    sent = uploads.groupby(["stage", "task", "client"])["up_bytes"].sum().groupby(["stage", "task"]).max() / 2**20
    for stage, rounds in (("model", 3), ("bases", 1), ("references", 1)):
        for task in (0, 1):
            assert ours[f"{stage}_mib_{task + 1}"] == pytest.approx(sent[stage, task] / rounds)
    assert ours["routing_2"] == pytest.approx(record["routing"]["accuracy"][1] / 100)
    assert runs["bases_mib"].item() == pytest.approx(sent["bases", 1])
    assert measure_named("bases_mib_1").header == "upload of bases, task 1 (MiB)"
    shown = {row[1].text: row for row in table.sheet.rows}
    place = next(n for n, header in enumerate(table.sheet.headers) if header.startswith("ours"))
    assert shown["routing_2"][place].text.startswith(f"{ours['routing_2']:.3f} (1)")
