"""The tables in results/: they say what our runs said, a sample comes out again, and they stand beside others."""

from __future__ import annotations

import sys

import pandas as pd
import pytest
import yaml

from benchmarks.reference import save
from fcl_bench.cli.app import main
from fcl_bench.cli.tables import main as tables
from fcl_bench.config import text
from fcl_bench.errors import UserError
from fcl_bench.results.collect import collect
from fcl_bench.results.reference import FROM, beside, folder, load, names
from fcl_bench.results.summarise import setting, summarise, used_runs
from tests.conftest import REPOSITORY
from tests.results.frames import real_runs

#: A user would see it, once for each column.
pytestmark = pytest.mark.filterwarnings("error::pandas.errors.PerformanceWarning")


@pytest.mark.parametrize("name", names())
def test_every_table_is_read_and_says_where_its_numbers_stand(name):
    about = yaml.safe_load((folder() / f"{name}.yaml").read_text())
    frame = load(name)
    assert len(frame) == about["runs"]
    assert frame["A_avg"].notna().all()
    assert frame["A_avg"].between(0, 100).all()
    assert about["commands"]
    for page in about["pages"]:
        assert (REPOSITORY / page).is_file()
    assert name in (folder() / "README.md").read_text()
    assert (folder() / f"{name}.csv").stat().st_size < 100_000


def test_there_are_tables():
    assert {"comparison", "closed-form", "one-round"} <= set(names())


@pytest.mark.slow
def test_what_is_saved_is_read_back(tmp_path, monkeypatch):
    out = real_runs(tmp_path, "beta=0.1,1")
    runs = collect(out / "runs")
    save(runs, tmp_path / "mine", {"pages": [], "commands": []})
    monkeypatch.setattr("fcl_bench.results.reference.folder", lambda: tmp_path)
    assert names() == ["mine"]
    back = load("mine").set_index("run_id")
    for _, run in runs.iterrows():
        row = back.loc[run["run_id"]]
        assert row["A_T"] == pytest.approx(run["A_T"], rel=1e-9)
        assert row["seed"] == run["seed"]
        for key in setting(runs):
            assert text(row[key]) == text(run[key]), key
    # The same settings: each stands beside its copy, and means are apart.
    both = summarise(used_runs(beside(runs, [])))
    assert both["label"].value_counts().to_dict() == {"fedran": 2, "fedran from=reference": 2}
    assert both["n"].tolist() == [2] * 4
    assert len(beside(runs[runs["beta"] == 1], [])) == 4


def test_an_unknown_table_is_told():
    with pytest.raises(UserError, match="--reference comparisn is not known .did you mean comparison"):
        load("comparisn")


@pytest.mark.slow
def test_a_sample_comes_out_again(tmp_path, monkeypatch):
    """One run of closed-form-digits, from its row alone."""
    wanted = load("closed-form-digits")
    wanted = wanted[(wanted["method"] == "fedncm") & (wanted["seed"] == 0)].iloc[0]
    keys = ("data", "tasks", "clients", "beta", "wire.dtype", "wire.factors", "wire.gram", "seed")
    given = [f"{key}={text(wanted[key])}" for key in keys]
    knobs = [
        f"{key}={text(wanted[key])}" for key in wanted.index if key.startswith("method.") and pd.notna(wanted[key])
    ]
    knobs = [knob for knob in knobs if not knob.startswith(("method.revision=", f"{FROM}="))]
    monkeypatch.setattr(sys, "argv", ["fcl-bench", f"out={tmp_path}", "method=fedncm", *given, *knobs])
    assert main() == 0
    [(_, made)] = collect(tmp_path / "runs").iterrows()
    for measure in ("A_avg", "A_T", "forgetting", "up_max_mib"):
        assert made[measure] == pytest.approx(wanted[measure], abs=0.3 if measure != "up_max_mib" else 1e-6), measure
    # Keys that came after the tables were made do not keep today's runs apart from them.
    assert len(beside(collect(tmp_path / "runs"), ["closed-form-digits"])) > 1


@pytest.mark.slow
def test_they_are_shown_where_there_are_no_runs_of_ones_own(in_process, tmp_path):
    given = ("fcl-tables", "--out", tmp_path, "--reference", "comparison", "--format", "csv")
    code, out, _ = in_process(tables, *given)
    assert code == 0
    assert "written: " in out
    read = pd.read_csv(tmp_path / "tables" / "summary.csv")
    assert len(read) == 15
    assert read.loc[(read["method"] == "stsa") & (read["beta"] == 0.1), "A_avg_mean"].round(2).tolist() == [74.16]


def test_a_slip_in_a_condition_on_them_is_told(in_process, tmp_path):
    given = ("fcl-tables", "--out", tmp_path, "--reference", "comparison", "--where", "bogus=1")
    code, _, err = in_process(tables, *given)
    assert code == 2
    assert "--where bogus=1: unknown key bogus" in err


@pytest.mark.slow
def test_they_are_drawn_without_curves_and_a_figure_of_curves_is_refused(in_process, tmp_path):
    given = ("fcl-tables", "--out", tmp_path, "--reference", "comparison", "--format", "csv")
    assert in_process(tables, *given, "--figures", "--html")[0] == 0
    drawn = {file.name.split(".")[1] for file in (tmp_path / "tables").glob("summary.*.png")}
    assert drawn == {"accuracy_against_bytes", "accuracy_against_beta"}
    assert (tmp_path / "tables" / "summary.html").read_text().count('<img alt="') == 2
    code, _, err = in_process(tables, *given, "--figures", "accuracy_matrix")
    assert code == 2
    assert "--figures accuracy_matrix: too few runs for it, or flat lines only (reference results have no" in err


@pytest.mark.slow
def test_settings_that_no_reference_has_are_told(in_process, tmp_path):
    out = real_runs(tmp_path)
    code, _, err = in_process(tables, "fcl-tables", "--out", out, "--reference", "comparison")
    assert code == 0
    assert "no reference run has the setting" in err
