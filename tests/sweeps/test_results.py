"""What a sweep says at its end: a table of its settings, and warnings."""

from __future__ import annotations

from rich.console import Console

from fcl_bench.sweeps.jobs import DONE, FAILED, JobReport
from fcl_bench.sweeps.summary import results_table, unmoved, varying, warnings


def report_of(number: int, *overrides: str, **changes) -> JobReport:
    result = {"A_avg": 90.0 + number, "A_T": 80.0 + number, "up_max_mib": 2.0}
    return JobReport(number, list(overrides), DONE, 0, seconds=1.0, **{"result": result, **changes})


def shown(reports) -> list[list[str]]:
    """The cells of the table of results."""
    table = results_table(reports, varying(report.overrides for report in reports))
    return [list(map(str, cells)) for cells in zip(*(list(column.cells) for column in table.columns), strict=True)]


def test_the_table_has_mean_and_deviation_of_each_setting():
    reports = [report_of(n, f"method={m}", f"seed={n % 2}", "tasks=2") for n, m in enumerate("aabb")]
    assert shown(reports) == [
        ["method=a", "2", "90.50 ± 0.71", "80.50 ± 0.71", "2.00 ± 0"],
        ["method=b", "2", "92.50 ± 0.71", "82.50 ± 0.71", "2.00 ± 0"],
    ]
    reports[0].gates = ["chance"]
    reports[3].result["A_T"] = None
    assert [row[::3] for row in shown(reports)] == [
        ["method=a \\[gate: chance]", "80.50 ± 0.71"],
        ["method=b", "not defined"],
    ]
    only_seeds = [report_of(n, f"seed={n}") for n in range(3)]
    assert shown(only_seeds) == [["all runs", "3", "91.00 ± 1.00", "81.00 ± 1.00", "2.00 ± 0"]]
    assert results_table([JobReport(0, [], FAILED, 2)], set()) is None


def test_a_list_in_brackets_is_shown_as_it_was_typed(capsys):
    presets = ("experiment/preset=[cifar,afl]", "experiment/preset=[cifar,stsa]")
    reports = [report_of(number, preset) for number, preset in enumerate(presets)]
    table = results_table(reports, {"experiment/preset"})
    Console(width=120).print(table)
    printed = capsys.readouterr().out
    assert all(preset in printed for preset in presets)


def test_warnings_are_told_once_with_their_number():
    reports = [report_of(n, warnings=["few", f"own {'ab'[n]}"]) for n in range(2)]
    assert warnings(reports) == ["  few (2 runs)", "  own a", "  own b"]
    many = warnings([report_of(0, warnings=["w" * n for n in range(1, 21)])])
    assert many[-1] == "  and 12 more, in what the runs printed"
    assert len(many) == 9


def test_warnings_that_differ_in_numbers_alone_are_one():
    texts = ("rank 54 of 64, condition above 2.6e+09", "rank 51 of 64, condition above 3.7e+9", "rank low")
    reports = [report_of(n, warnings=[text]) for n, text in enumerate(texts)]
    assert warnings(reports) == [f"  {texts[0]} (2 runs)", "  rank low"]


def test_settings_that_no_partition_changes_are_named_with_what_varied():
    typed = [(m, b, s) for m in ("afl", "fedavg") for b in ("0.1", "1") for s in "01"]
    jobs = [(f"method={m}", f"beta={b}", f"seed={s}") for m, b, s in typed]
    seeds = "seeds change the class order and the projection only."
    told = unmoved(jobs[:4], varying(jobs))
    assert told == f"method=afl: accuracy does not depend on beta, but for rounding; {seeds}"
    assert unmoved(jobs[:2], {"seed"}) == f"all runs: {seeds}"
    assert unmoved([], {"beta", "seed"}) == ""
    assert unmoved(jobs[:1], {"method"}) == ""
