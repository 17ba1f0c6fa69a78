"""What a sweep says at its end: a table of its settings, and warnings."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from fcl_bench.sweeps.jobs import DONE, FAILED, JobReport
from fcl_bench.sweeps.summary import results_table, varying, warnings

ALONE = " (one seed, no interval)"


def report_of(number: int, *overrides: str, **changes) -> JobReport:
    result = {"A_avg": 90.0 + number, "A_T": 80.0 + number, "up_max_mib": 2.0}
    return JobReport(number, list(overrides), DONE, 0, seconds=1.0, **{"result": result, **changes})


def shown(reports) -> list[list[str]]:
    """The cells of the table of results."""
    table, _ = results_table(reports, varying(report.overrides for report in reports))
    return [list(map(str, cells)) for cells in zip(*(list(column.cells) for column in table.columns), strict=True)]


def test_the_table_has_mean_deviation_and_best_of_each_setting():
    reports = [report_of(n, f"method={m}", f"seed={n % 2}", "tasks=2") for n, m in enumerate("aabb")]
    assert shown(reports) == [
        ["method=a", "2", "90.50 ± 0.71", "80.50 ± 0.71", "81.00 (1)", "2"],
        ["method=b", "2", "92.50 ± 0.71", "82.50 ± 0.71", "83.00 (1)", "2"],
    ]
    assert results_table(reports, {"method", "seed"})[1] == "highest mean A_T: method=b"  # by 2 points in each seed
    reports[3].result["A_T"] = None
    assert shown(reports)[1][3:5] == ["82.00", "82.00"]
    only_seeds = [report_of(n, f"seed={n}") for n in range(3)]
    assert shown(only_seeds) == [["all runs", "3", "91.00 ± 1.00", "81.00 ± 1.00", "82.00 (2)", "2"]]
    assert results_table([JobReport(0, [], FAILED, 2)], set()) is None


@pytest.mark.slow
def test_a_ceiling_is_not_the_best(command, feature_file, tmp_path):
    small = ("data=features", f"data.path={feature_file}", f"out={tmp_path}", "tasks=2", "clients=2", "device=cpu")
    out = command("-m", "method=centralised_ridge,afl,fedncm", *small)[1]
    assert re.search(
        r"^highest mean A_T \(centralised_ridge aside\): method=(?:afl|fedncm); not distinguishable from it: "
        r"method=(?:afl|fedncm) \(one seed, no interval\)$",
        out,
        flags=re.MULTILINE,
    )
    methods = ("stsa", "afl", "centralised_ridge")
    reports = [report_of(n, f"method={method}", method=method) for n, method in enumerate(methods)]
    assert results_table(reports, {"method"})[1] == f"highest mean A_T (centralised_ridge aside): method=afl{ALONE}"
    assert results_table(reports[1:], {"method"})[1] == ""
    reports[0].gates = ["chance"]
    table, line = results_table([*reports, report_of(3, "method=fedncm", method="fedncm")], {"method"})
    assert [str(cell) for cell in table.columns[0].cells][:2] == ["method=stsa [gate: chance]", "method=afl"]
    assert line.startswith("highest mean A_T (centralised_ridge and 1 that meet a gate aside): method=")
    assert "stsa" not in line
    ceilings = [report_of(n, f"beta={n}", method="centralised_ridge") for n in range(2)]
    assert results_table(ceilings, {"beta"})[1] == f"highest mean A_T: beta=1{ALONE}"


def test_settings_that_are_not_distinguishable_from_the_highest_are_named():
    reports = [report_of(n, f"method={method}") for n, method in enumerate("abc")]
    reports[1].result["A_T"] = reports[2].result["A_T"]
    line = results_table(reports, {"method"})[1]
    assert line == f"highest mean A_T: method=b; not distinguishable from it: method=c{ALONE}"
    reports[1].result["A_T"] += 0.004  # the table prints the same number
    assert results_table(reports, {"method"})[1] == f"highest mean A_T: method=b{ALONE}"
    reports = [report_of(n, f"method={'abc'[n % 3]}", f"seed={n // 3}") for n in range(9)]
    for report, accuracy in zip(reports, (70, 69, 50, 72, 74, 52, 75, 74, 55), strict=True):
        report.result["A_T"] = float(accuracy)
    line = results_table(reports, {"method", "seed"})[1]
    assert line == "highest mean A_T: method=a; not distinguishable from it: method=b"
    reports[0].result["A_T"] = None  # one run without an accuracy
    assert results_table(reports, {"method", "seed"})[1].startswith("highest mean A_T: method=a; not dist")


def test_a_list_in_brackets_is_shown_as_it_was_typed(capsys):
    presets = ("experiment/preset=[cifar,afl]", "experiment/preset=[cifar,stsa]")
    reports = [report_of(number, preset) for number, preset in enumerate(presets)]
    table, _ = results_table(reports, {"experiment/preset"})
    Console(width=120).print(table)
    printed = capsys.readouterr().out
    assert all(preset in printed for preset in presets)


def test_warnings_are_told_once_with_their_number():
    reports = [report_of(n, warnings=["few", f"own {n}"]) for n in range(2)]
    assert warnings(reports) == ["  few (2 runs)", "  own 0", "  own 1"]
    many = warnings([report_of(0, warnings=[f"w{n}" for n in range(20)])])
    assert many[-1] == "  and 12 more, in what the runs printed"
    assert len(many) == 9
