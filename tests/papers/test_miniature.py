"""Runs of profile=quick stand beside the printed numbers whose cells they are."""

from __future__ import annotations

import shlex

import pytest

from fcl_bench.papers.experiments import MINIATURE, grid_cells, stand_ins
from fcl_bench.papers.matching import overrides, settings_of
from fcl_bench.papers.tables import NO_METRIC, paper_tables, printed_cells
from fcl_bench.results.collect import collect
from fcl_bench.results.summarise import used_runs
from tests.small_runs import run_in


@pytest.mark.slow
def test_every_cell_of_a_grid_stands_for_the_printed_numbers_of_its_setting():
    """FedRAN's Figure 6 prints M 2,048 and 8,192 at r 1,024: the third and seventh of eight cells."""
    grid = grid_cells("fedran_figure6", "quick")
    printed = printed_cells("fedran", "Figure 6")
    printed = printed[printed["metric"] == "A_avg"]
    found = [stand_ins(cell, settings_of(overrides(cell))) for _, cell in printed.iterrows()]
    assert [[typed for typed, _ in stands] for stands in found] == [[grid[2]], [grid[6]]]


@pytest.mark.slow
def test_a_run_in_miniature_fills_its_cell_and_no_other(tmp_path):
    typed = grid_cells("fedran_figure6", "quick")[2]
    run = run_in(tmp_path, *typed)
    assert (run.record["experiment"], run.record["profile"]) == ("fedran_figure6", "quick")
    cells = printed_cells("fedran", "Figure 6")
    runs = used_runs(collect(tmp_path / "runs"))
    [table] = paper_tables(cells, runs, tmp_path / "runs", "quick")
    assert table.sheet.title == "fedran, Figure 6, in miniature"
    assert table.sheet.notes[0] == MINIATURE
    values = table.values.set_index("column")
    own = values.loc["M = 2048 / r = 1024 / A_avg"]
    assert own["ours, cpu, task-agnostic mean"] == pytest.approx(run.record["metrics"]["A_avg"])
    assert own["command"] == f"fcl-bench {shlex.join(typed)}"
    assert values.loc["M = 8192 / r = 1024 / A_avg", "state"] == "not run"
    assert (values["state"] == NO_METRIC).sum() == 2
    # In full nothing has been run.
    [table] = paper_tables(cells, runs, tmp_path / "runs")
    assert "run" not in set(table.values["state"])
