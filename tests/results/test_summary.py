"""Means and standard deviations over seeds, and what must never be averaged."""

from __future__ import annotations

import numpy as np
import pytest
import yaml
from scipy import stats

from fcl_bench.errors import UserError
from fcl_bench.results.collect import collect
from fcl_bench.results.summarise import split_by_setting, summarise, used_runs, varying_setting
from fcl_bench.results.tables.markup import latex_table, markdown_page
from fcl_bench.results.tables.rivals import constants
from fcl_bench.results.tables.sections import screen_table, sections, summary_table
from tests.results.frames import made_up
from tests.small_runs import run_in


def summary_of(*runs):
    return summarise(used_runs(made_up(*runs)))


def summary_sheet(summary):
    """The table for readers; the runs behind it are those of `made_up`."""
    runs = summary.assign(written=0.0, path="")
    return summary_table(runs, summary).sheet


def column(summary, header):
    """Text and mark of its cells."""
    sheet = summary_sheet(summary)
    cells = [row[sheet.headers.index(header)] for row in sheet.rows]
    return [(cell.text, cell.mark) for cell in cells]


def markdown(summary):
    return markdown_page(summary_sheet(summary))


def test_means_and_standard_deviations_are_over_seeds():
    values = [70.0, 73.0, 77.0]
    summary = summary_of(*({"seed": seed, "A_avg": value} for seed, value in enumerate(values)))
    [row] = summary.to_dict("records")
    assert (row["n"], row["seeds"], row["run_ids"]) == (3, [0, 1, 2], ["run0", "run1", "run2"])
    assert row["A_avg_mean"] == pytest.approx(220 / 3)
    assert row["A_avg_std"] == pytest.approx(np.sqrt(sum((v - 220 / 3) ** 2 for v in values) / 2))
    assert column(summary, "A_avg (%)") == [("73.33 ± 3.51", "")]


def test_one_run_has_no_standard_deviation():
    summary = summary_of({})
    assert np.isnan(summary["A_avg_std"][0])
    assert column(summary, "A_avg (%)") == [("80.00", "")]
    assert "±" not in markdown(summary).split("| --- |")[1].splitlines()[1]


def test_the_undefined_is_called_so_and_one_undefined_seed_leaves_no_mean():
    summary = summary_of(
        {"forgetting": np.nan},
        {"seed": 1, "forgetting": 5.0},
        {"clients": 9, "fedran_mib": 2.0, "stsa_mib": np.nan},
        {"clients": 9, "seed": 1, "fedran_mib": 2.0},
    )
    assert column(summary, "forgetting (%)") == [("not defined", ""), ("10.00 ± 0", "")]
    assert column(summary, "FedRAN's count (MiB)") == [("not defined", ""), ("2.00 ± 0", "")]
    page = markdown(summary)
    assert "STSA's" not in page
    assert "nan" not in page.lower()
    assert "|  |" not in page


@pytest.mark.parametrize("key", ["device", "method_revision", "method_complement", "beta", "wire.dtype", "split.first"])
def test_what_differs_in_anything_but_the_seed_is_not_averaged(key):
    summary = summary_of({key: "one"}, {key: "other", "seed": 1}, {"seed": 2})
    assert summary["n"].tolist() == [1, 1, 1]


def test_of_equal_configurations_and_seeds_the_newest_counts_and_a_warning_says_so(caplog):
    summary = summary_of(
        {"A_avg": 1.0, "run_id": "new", "written": 9.0},
        {"A_avg": 2.0, "run_id": "old", "written": 3.0},
        {"A_avg": 3.0, "run_id": "other", "seed": 1},
    )
    assert summary["run_ids"].tolist() == [["new", "other"]]
    assert summary["A_avg_mean"].tolist() == [2.0]
    [warning] = caplog.messages
    why = "not counted, since a run of the same configuration and seed is newer or tested more rounds"
    assert warning == f"{why}: fedran, seed 0 (old)"


def test_runs_that_do_not_count_are_told_in_one_line(caplog):
    summary_of(*({"seed": seed} for seed in (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5)))
    [warning] = caplog.messages
    assert warning.endswith("fedran, seed 2 (run2); fedran, seed 3 (run3); and 2 more")


def test_a_run_that_knows_its_best_round_counts_before_a_newer_one_that_does_not(caplog):
    summary = summary_of(
        {"A_T": 1.0, "A_T_best": 4.0, "run_id": "watched", "written": 3.0},
        {"A_T": 1.0, "run_id": "newer", "written": 9.0},
    )
    assert summary["run_ids"].tolist() == [["watched"]]
    assert summary[["A_T_mean", "A_T_best_mean"]].to_numpy().tolist() == [[1.0, 4.0]]
    assert caplog.messages[0].endswith(": fedran, seed 0 (newer)")


@pytest.mark.parametrize(("every", "best"), [((1, 1), 65.0), ((1, 2), np.nan), ((1, 0), np.nan)])
def test_the_best_of_different_rounds_has_no_mean(every, best):
    summary = summary_of(
        {"A_T_best": 60.0, "evaluate_rounds": every[0]},
        {"A_T_best": 70.0 if every[1] else np.nan, "evaluate_rounds": every[1], "seed": 1},
    )
    assert summary["A_T_best_mean"].tolist() == pytest.approx([best], nan_ok=True)
    assert np.isnan(summary["A_T_best_std"][0]) == np.isnan(best)
    assert summary["A_T_mean"].tolist() == [70.0]


def test_of_runs_that_tested_different_rounds_the_one_that_tested_most_counts(caplog):
    tested = [{"A_T_best": 60.0, "evaluate_rounds": every} for every in (2, 1, 4)]
    assert summary_of(*tested, {"evaluate_rounds": 0})["run_ids"].tolist() == [["run1"]]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("key", ["device", "protocol", "tasks"])
def test_what_never_shares_a_panel_is_no_knob(key):
    frame = made_up({}, {"method": "stsa"}).assign(protocol="task-agnostic")
    with pytest.raises(UserError, match=f"--together {key}: .* never share a panel .*--where {key}=VALUE"):
        split_by_setting(frame, [key])


def test_labels_name_the_knobs_that_vary_within_the_method():
    runs = used_runs(
        made_up(
            {"method_M": 2048, "method_rank": 512, "method_ridge": 1e-3, "method_complement": "floor"},
            {"method_M": 2048, "method_rank": 64, "method_ridge": 1e-5, "method_complement": "null"},
            {"method_M": 2048, "method_rank": 64, "method_ridge": 1e-5},
            {"method": "stsa", "method_M": 4096},
        )
    )
    assert dict(zip(runs["run_id"], runs["label"], strict=True)) == {
        "run0": "fedran rank=512 ridge=0.001 complement=floor",
        "run1": "fedran rank=64 ridge=1e-05 complement=null",
        "run2": "fedran rank=64 ridge=1e-05",
        "run3": "stsa",
    }
    assert sorted(set(runs["family"])) == ["fedran", "fedran complement=floor", "fedran complement=null", "stsa"]


def test_rows_are_in_the_order_of_the_setting_then_the_knobs_by_size():
    grid = [{"method_rank": rank, "beta": beta} for rank in (256, 32, 8) for beta in (1.0, "null", 0.1)]
    summary = summary_of(*grid)
    assert summary["beta"].tolist() == [0.1] * 3 + [1.0] * 3 + ["null"] * 3
    assert summary["method.rank"].tolist() == [8, 32, 256] * 3


def test_only_what_varies_has_a_column_and_the_rest_is_one_line():
    summary = summary_of(
        {"partition": "dirichlet", "partition.min_size": 1, "method_rank": 8, "features": "a0"},
        {"partition": "iid", "method_rank": 8, "features": "a0"},
        {"partition": "iid", "method": "stsa", "method_gamma": 100.0, "features": "a0"},
    )
    assert varying_setting(summary) == ["partition"]  # which tells partition.min_size
    assert summary_sheet(summary).headers[:3] == ["method", "partition", "n"]
    assert constants(summary) == [
        "data digits, beta 0.1, clients 5, tasks 5, wire.dtype float32, device cpu",
        "fedran: rank 8; stsa: gamma 100",
    ]
    assert f"\n\n{constants(summary)[0]}\n\n" in markdown(summary)


def test_minor_keys_have_a_column_where_nothing_else_tells_them():
    summary = summary_of({"partition.min_size": 0}, {"partition.min_size": 1}, {"partition.min_size": 1, "beta": 1.0})
    assert varying_setting(summary) == ["beta", "partition.min_size"]


def test_the_best_is_marked_in_each_setting_and_the_ceiling_aside():
    summary = summary_of(
        {"method": "afl", "A_avg": 71.0},
        {"method": "fedran", "A_avg": 70.001},
        {"method": "centralised_ridge", "A_avg": 99.0},
        {"method": "stsa", "A_avg": 70.002},
        {"method": "stsa_e", "A_avg": 60.0},
        {"method": "afl", "A_avg": 50.0, "beta": 1.0},
    )
    marks = ["bold", "", "", "", "", ""]
    assert [mark for _, mark in column(summary, "A_avg (%)")] == marks
    page = markdown(summary)
    assert "**71.00**" in page
    assert "Without an interval (one seed" in page
    assert "The ceilings (centralised_ridge, centralised_softmax, centralised), which see" in page


def test_what_is_not_distinguishable_over_seeds_is_marked_with_the_best():
    """Not the mean of any n that prints highest: rows are paired by seed, and a row of other seeds is not compared."""
    accuracies = {"afl": (71.0, 75.0, 80.0), "fedran": (70.0, 76.0, 78.0), "stsa": (61.0, 65.0, 70.0)}
    summary = summary_of(
        *({"method": m, "A_avg": a, "seed": seed} for m, own in accuracies.items() for seed, a in enumerate(own)),
        {"method": "fedncm", "A_avg": 99.0, "seed": 7},
    )
    assert [mark for _, mark in column(summary, "A_avg (%)")] == ["bold", "", "bold", ""]
    assert markdown(summary).rstrip().endswith("Not compared, no seed in common: fedncm.")
    values = sections(summary)["accuracy"].values.set_index("method")
    oracle = stats.ttest_rel(accuracies["afl"], accuracies["fedran"]).confidence_interval(0.95)
    numbers = values.loc["fedran", ["A_avg_behind", "A_avg_behind_low", "A_avg_behind_high"]].astype(float)
    assert numbers.tolist() == pytest.approx([2 / 3, oracle.low, oracle.high], rel=1e-3)
    assert values.loc["stsa", "A_avg_behind_low"] == pytest.approx(10.0)
    assert values.loc["fedncm", "A_avg_behind"] == "not defined"


def test_the_least_forgetting_is_marked_by_the_same_rule_and_no_cost_is():
    forgotten = {"afl": (4.0, 5.0, 7.0), "fedran": (5.0, 4.0, 8.0), "stsa": (14.0, 15.0, 17.0)}
    summary = summary_of(
        *({"method": m, "forgetting": f, "seed": seed} for m, own in forgotten.items() for seed, f in enumerate(own)),
        {"method": "centralised_ridge", "forgetting": 0.0},
        {"method": "fedncm", "forgetting": 0.0, "gates": "chance"},
    )
    marks = {text.partition(" ")[0]: mark for text, mark in column(summary, "method")}
    marks = dict(zip(marks, (mark for _, mark in column(summary, "forgetting (%)")), strict=True))
    assert marks == {"afl": "bold", "centralised_ridge": "", "fedncm": "", "fedran": "bold", "stsa": ""}
    assert {mark for _, mark in column(summary, "upload (MiB)")} == {""}
    tex = latex_table(summary_sheet(summary))
    assert r"& \bfseries 5.33 +- 1.53 &" in tex
    assert r"& \bfseries 5.67 +- 2.08 &" in tex


def test_a_row_that_meets_a_gate_says_so_and_is_never_the_best():
    summary = summary_of(
        {"method": "afl", "A_avg": 71.0, "gates": ""},
        {"method": "fedncm", "A_avg": 60.0, "gates": ""},
        {"method": "fedran", "A_avg": 90.0, "gates": "chance, rising"},
        {"method": "stsa", "A_avg": 70.0, "gates": ""},
        {"method": "stsa", "A_avg": 70.0, "gates": "growth", "seed": 1},
    )
    assert [mark for _, mark in column(summary, "A_avg (%)")] == ["bold", "", "", ""]
    methods = [text for text, _ in column(summary, "method")]
    assert methods == ["afl", "fedncm", "fedran [gate: chance, rising]", "stsa [gate: growth]"]


def first_tasks(*runs):
    """The gates of runs with 100 test samples in the first task, in the order of the tables."""
    common = {"first_samples": 100, "gates": "", "gate_texts": "", "method_training.rounds": 10}
    return [
        (row["label"], row["gates"]) for _, row in used_runs(made_up(*({**common, **run} for run in runs))).iterrows()
    ]


def test_a_first_task_far_below_that_of_fedavg_is_a_gate():
    fedavg, low = {"method": "fedavg", "first_task": 90.0}, {"method": "moon", "first_task": 40.0}
    assert first_tasks(fedavg, low) == [("fedavg", ""), ("moon", "first_task")]
    assert first_tasks(fedavg, {**low, "gates": "chance"}) == [("fedavg", ""), ("moon", "chance, first_task")]
    # A bad rate of FedAvg itself; the yardstick is its best run.
    assert first_tasks(fedavg, {**fedavg, "method_lr": 1e-9, "first_task": 10.0})[0][1] == "first_task"
    # A closed form has no rounds: every budget of FedAvg will do.
    assert first_tasks(fedavg, {**low, "method": "afl", "method_training.rounds": np.nan})[0] == ("afl", "first_task")
    summary = summary_of(*({"first_samples": 100, "gates": "", "gate_texts": "", **run} for run in (fedavg, low)))
    assert summary["gate_texts"].tolist() == [
        "",
        "seed 0: first_task (task 1): 40.0 % of its samples are right, FedAvg's 90.0 %",
    ]


def test_a_first_task_that_fedavg_does_not_judge_is_none():
    fedavg, low = {"method": "fedavg", "first_task": 90.0}, {"method": "moon", "first_task": 40.0}
    others = [{"seed": 1}, {"beta": 1.0}, {"clients": 9}, {"method_training.rounds": 20}, {"first_task": 46.0}]
    others += [{"first_samples": 2}, {"first_task": np.nan}]
    for other in others:
        assert {gates for _, gates in first_tasks(fedavg, {**low, **other})} == {""}, other
    assert first_tasks(low) == [("moon", "")]


@pytest.mark.slow
def test_runs_on_validation_samples_are_a_setting_of_their_own(tmp_path):
    for typed in (("seed=0",), ("seed=1", "data.validation=0.2"), ("seed=2", "data.validation=0.2", "data.test=false")):
        run_in(tmp_path, "method=afl", "tasks=2", *typed)
    summary = summarise(used_runs(collect(tmp_path / "runs")))
    assert len(summary) == 3
    assert varying_setting(summary) == ["data.validation", "data.test"]


def test_small_sizes_keep_three_digits():
    sizes = [0.000977, 0.0312, 1.5, 40.8]
    summary = summary_of(*({"clients": k, "up_max_mib": size} for k, size in enumerate(sizes)))
    assert [text for text, _ in column(summary, "upload (MiB)")] == ["0.000977", "0.0312", "1.50", "40.80"]


@pytest.mark.parametrize("kept", [0.0, 2.0])
def test_the_note_explains_what_is_shown_and_nothing_else(kept):
    sheet = summary_sheet(summary_of({"client_storage_mib": kept}))
    assert ("kept by a client (MiB)" in sheet.headers) == ("Kept by a client: " in sheet.notes[-2]) == (kept > 0)
    assert "Upload: " in sheet.notes[-2]


def test_a_narrow_terminal_goes_without_the_last_columns_and_is_told():
    summary = summary_of({"fedran_mib": 1.0}, {"beta": 1.0})
    sheet = summary_sheet(summary)
    assert screen_table(summary, sheet, 10_000, whole=True)[1] == []
    table, left_out = screen_table(summary, sheet, 80, whole=True)
    assert left_out == ["FedRAN's count (MiB)"]
    assert [column.header for column in table.columns] == sheet.headers[:-1]
    # Where columns of settings would leave no room, each setting stands above its rows.
    narrow, left_out = screen_table(summary, sheet, 20, whole=True)
    assert [column.header for column in narrow.columns] == [sheet.headers[0], *sheet.headers[2:5]]
    assert left_out == sheet.headers[5:]
    assert list(map(str, narrow.columns[0].cells))[::2] == ["beta 0.1", "beta 1"]


def test_the_screen_has_the_few_measures_that_answer_most_questions_unless_others_are_asked_for():
    summary = summary_of({"fedran_mib": 1.0}, {"beta": 1.0})
    sheet = summary_sheet(summary)
    table, left_out = screen_table(summary, sheet, 10_000, whole=False)
    assert left_out == ["FedRAN's count (MiB)"]
    assert [column.header for column in table.columns] == sheet.headers[:-1]


def test_a_setting_of_several_rows_stands_above_them_and_not_in_columns():
    summary = summary_of(*({"method": method, "beta": beta} for method in ("afl", "stsa") for beta in (0.1, 1.0)))
    table, _ = screen_table(summary, summary_sheet(summary), 80, whole=True)
    assert [column.header for column in table.columns[:4]] == ["method", "n", "A_avg (%)", "A_T (%)"]
    assert list(map(str, table.columns[0].cells)) == ["beta 0.1", "afl", "stsa", "beta 1", "afl", "stsa"]


def test_a_bar_in_a_name_does_not_break_the_markdown():
    page = markdown(summary_of({"data": "a|b"}, {"data": "c"}))
    assert "| a\\|b |" in page


def configured(folder, method="afl.AFL", **changes):
    """A run's folder with no more than what says whether the partition counts."""
    nothing = {"_target_": "fcl_bench.options.none.NoOption"}
    knobs = changes.pop("knobs", {})
    config = {**dict.fromkeys(("adapt", "faults", "noise"), nothing), "label_rate": 1.0, "data": {}, **changes}
    config["method"] = {"_target_": f"fcl_bench.methods.closed_form.{method}", **knobs}
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return {"path": str(folder)}


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"method": "fedran.FedRAN"}, False),
        ({"knobs": {"ri": False}}, False),
        ({"label_rate": 0.5}, False),
        ({"data": {"validation": 0.1}}, False),
        ({"noise": {"_target_": "fcl_bench.options.noise.gaussian.Gaussian"}}, False),
        ({"method": "gone.Gone"}, False),
    ],
)
def test_a_table_says_where_the_partition_changes_nothing(changes, holds, tmp_path):
    runs = [{"beta": beta, "seed": seed} for beta in (0.1, 1.0) for seed in (0, 1)]
    summary = summary_of(*(run | configured(tmp_path / str(n), **changes) for n, run in enumerate(runs)))
    told = "fedran: accuracy does not depend on beta, but for rounding; seeds change the class order and"
    assert (told in summary_sheet(summary).notes[-1]) == holds
    alone = summary_of(configured(tmp_path / "alone", **changes))
    assert "does not depend" not in summary_sheet(alone).notes[-1]
