"""Which runs stand beside a printed number where several of one seed could, and how their lines are marked."""

from __future__ import annotations

import pytest

from fcl_bench.results.collect import collect
from fcl_bench.results.summarise import used_runs
from tests.results.test_paper_tables import OURS, cell, table_of
from tests.small_runs import run_in

SMALL = ("method=fedran", "method.M=32", "method.rank=8", "tasks=2", "clients=2", "beta=0.1")
TRAINED = ("method.trains=features", "method.training.rounds=3", "method.training.epochs=1")


def runs_in(out):
    return used_runs(collect(out / "runs"))


@pytest.mark.slow
def test_writing_predictions_down_is_no_other_setting(tmp_path):
    run_in(tmp_path, *SMALL, "predictions=true")
    assert table_of(runs_in(tmp_path), tmp_path / "runs", cell()).values[f"{OURS} n"].tolist() == [1]


@pytest.mark.slow
def test_the_best_of_other_rounds_than_the_papers_is_not_compared(tmp_path):
    """The best of every second round is another choice on test data; the last round's accuracy is the same."""
    for seed, every in ((0, 1), (1, 2), (2, 0)):
        run_in(tmp_path, "method=fedavg", *TRAINED, "tasks=1", "clients=2", f"evaluate_rounds={every}", f"seed={seed}")
    runs, matched = runs_in(tmp_path), " ".join([*TRAINED, "evaluate_rounds=1"])
    said = {"method": "fedavg", "tasks": "1", "setting": matched}
    best, last = (table_of(runs, tmp_path / "runs", cell(metric=name, **said)) for name in ("A_T_best", "A_T"))
    assert (best.values[f"{OURS} n"].tolist(), last.values[f"{OURS} n"].tolist()) == ([1], [3])
    assert best.runs.set_index("seed")["differs"].to_dict() == {
        0: "nothing",
        1: "evaluate_rounds=1, here 2",
        2: "evaluate_rounds=1, here 0",
    }


@pytest.mark.slow
def test_the_note_below_says_how_skewed_the_partitions_behind_the_numbers_are(tmp_path):
    """Of those that stand beside printed numbers alone, one setting after the other."""
    records = {
        (beta, seed): run_in(tmp_path, *SMALL[:-1], f"beta={beta}", f"seed={seed}").record["partition_skew"]
        for beta, seed in ((0.1, 0), (0.1, 1), (1, 0), (5, 0))
    }
    cells = [cell(), cell(beta="1", column="another")]
    runs = runs_in(tmp_path)

    def notes():
        return [note for note in table_of(runs, tmp_path / "runs", *cells).sheet.notes if "Total variation" in note]

    said = {at: f"{found['total_variation']:.3f} ({found['percentile']:g})" for at, found in records.items()}
    first = f"dirichlet beta 0.1, 2 clients, 2 tasks: seed 0 {said[0.1, 0]}, seed 1 {said[0.1, 1]}"
    [note] = notes()
    assert note.endswith(f": digits, {first}; digits, dirichlet beta 1, 2 clients, 2 tasks: seed 0 {said[1, 0]}.")


@pytest.mark.slow
def test_a_seed_that_was_run_with_and_without_bounds_counts_once(tmp_path):
    for bounds, seed in (("false", 0), ("true", 0), ("false", 1)):
        run_in(tmp_path, *SMALL, f"method.bounds={bounds}", f"seed={seed}")
    runs = runs_in(tmp_path)
    runs.loc[~runs["method.bounds"] & (runs["seed"] == 0), "A_avg"] = 0.0
    newest = runs[runs["method.bounds"] | (runs["seed"] == 1)]
    table = table_of(runs, tmp_path / "runs", cell())
    assert table.values[f"{OURS} n"].tolist() == [2]
    assert table.values[f"{OURS} mean"].tolist() == [newest["A_avg"].mean()]
    told = table.runs.set_index("run_id")
    assert set(told.index[told["used"]]) == set(newest["run_id"])
    assert told.loc[~told["used"], "differs"].tolist() == ["nothing; a newer run of its seed counts"]


@pytest.mark.slow
def test_lines_of_different_settings_do_not_compete(tmp_path):
    """The paper leaves beta open: ours at two values is no contest."""
    for rank, beta in ((8, 0.1), (8, 1), (16, 0.1)):
        run_in(tmp_path, *SMALL, f"method.rank={rank}", f"beta={beta}")
    runs = runs_in(tmp_path)
    runs["A_avg"] = runs["method.rank"].map({8: 50.0, 16: 40.0}) + 40 * (runs["beta"] == 1)

    def marks(*cells):
        sheet = table_of(runs, tmp_path / "runs", *cells).sheet
        where, ours = (sheet.headers.index(header) for header in ("where", f"{OURS} (n)"))
        return [(row[where].text, row[ours].mark) for row in sheet.rows], sheet.notes[-1]

    wide, narrow = (cell(beta="", row=str(r), setting=f"method.M=32 method.rank={r}", value=str(r)) for r in (8, 16))
    assert marks(wide)[0] == [("beta 0.1", ""), ("beta 1", "")]
    found, note = marks(wide, narrow)
    assert found == [("beta 0.1", "bold"), ("beta 1", ""), ("beta 0.1", "")]
    assert note == "Without an interval (one seed, no predictions=true) the best number alone is bold."


@pytest.mark.slow
def test_a_run_that_meets_a_gate_is_never_the_best_beside_a_printed_number(tmp_path):
    for rank in (8, 16):
        run_in(tmp_path, *SMALL, f"method.rank={rank}")
    runs = runs_in(tmp_path)
    runs["gates"] = runs["method.rank"].map({8: "growth", 16: ""})
    runs["A_avg"] = runs["method.rank"].map({8: 90.0, 16: 40.0})
    cells = [cell(row=str(r), setting=f"method.M=32 method.rank={r}", value=str(r)) for r in (8, 16)]
    sheet = table_of(runs, tmp_path / "runs", *cells).sheet
    ours = [row[sheet.headers.index(f"{OURS} (n)")] for row in sheet.rows]
    assert [(found.text, found.mark) for found in ours] == [("90.00 (1) [gate: growth]", ""), ("40.00 (1)", "")]
