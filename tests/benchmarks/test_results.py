"""What the benchmark suite keeps of its sides, and its table, lines and comparisons of what was measured."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import compare
import pytest
import report
import table as table_command
import torch
from suite import lines, results, table
from suite.sides import Beside, case_name, each, limit, ours, peer

CPU = torch.device("cpu")


class Pedantic:
    """pytest-benchmark's fixture as far as `Beside` uses it."""

    def __init__(self) -> None:
        self.extra_info: dict = {}
        self.group = None
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))

    def pedantic(self, target, setup, rounds, warmup_rounds):
        for _ in range(warmup_rounds + rounds):
            setup()
            target()
        self.stats.stats.data = [1.0] * rounds


def test_sides_take_turns_and_only_measured_rounds_are_kept():
    calls = []
    fixture = Pedantic()
    beside = Beside(fixture, "stage", {"n": 3, "dtype": "float32"}, CPU, rounds=2, warmup=1)
    beside(
        ours("a", each(lambda: calls.append("ours"))),
        limit("b", each(lambda: calls.append("limit"))),
        peer("c", each(lambda: calls.append("peer"))),
        values={"error": 0.5},
    )
    assert calls == ["limit", "ours", *["limit", "peer", "ours"] * 2]
    told = fixture.extra_info
    assert (told["name"], told["values"]) == ("stage: n=3 float32", {"error": 0.5})
    assert [(side["role"], len(side["seconds"]), len(side["processor"])) for side in told["sides"]] == [
        ("ours", 2, 2),
        ("limit", 2, 2),
        ("peer", 2, 2),
    ]
    json.dumps(told)


def test_a_share_is_scaled_to_the_whole():
    side = peer("c", each(lambda: sum(range(200_000))), share=0.01)
    side.time(CPU)
    whole = peer("c", each(lambda: sum(range(200_000))))
    whole.time(CPU)
    assert side.processor[0] > 20 * whole.processor[0]


def entry(stage: str = "statistics", case: dict | None = None, **changes) -> dict:
    """One benchmark as pytest-benchmark writes it, with three rounds."""
    rounds = {"ours": [2.0, 4.0, 3.0], "limit": [1.0, 2.0, 2.0], "peer": [20.0, 80.0, 30.0]}
    words = {"ours": ("ours", 1, 30.0), "limit": ("bare", 1, 20.0), "peer": ("plain", 0.1, None)}
    sides = []
    for role, (what, share, flops) in words.items():
        told = {"role": role, "what": what, "share": share, "flops": flops}
        sides.append({**told, "seconds": rounds[role], "processor": [1.0, 1.0, 1.0]})
    case = {"n": 10000, "d": 512, "M": 5000, "C": 10, "dtype": "float64"} if case is None else case
    info = {"name": case_name(stage, case), "stage": stage, "sizes": case, "sides": sides, "values": {}, **changes}
    return {"name": f"bench_{stage}", "extra_info": info}


def result(*entries: dict) -> dict:
    machine = {"cpu": {"brand_raw": "A CPU"}}
    return {"machine_info": machine, "commit_info": {"id": "c" * 40}, "benchmarks": list(entries)}


def slower(one: dict, factor: float) -> dict:
    """The same benchmark with ours slower."""
    one = copy.deepcopy(one)
    first = one["extra_info"]["sides"][0]
    first["seconds"] = [factor * second for second in first["seconds"]]
    return one


def test_ratios_are_medians_over_rounds():
    (case,) = results.of_json(result(entry()), "made").cases.values()
    (bare,), (plain,) = case.beside("limit"), case.beside("peer")
    assert case.ours.median == 3
    assert results.ratio(case.ours, bare) == 2  # of 2, 2 and 1.5, not 3 / 2
    assert results.ratio(plain, case.ours) == 10
    assert results.rate_ratio(case.ours, bare) == 0.75
    assert results.rate_ratio(plain, case.ours) is None


def test_the_table_has_every_side_a_mark_and_the_lines():
    text = table.markdown(results.of_json(result(entry(), entry("solve", {"M": 5, "C": 2})), "made"))
    assert "A CPU" in text
    assert "commit cccccccccccc," in text
    row = "3 s | 2 s (bare) | 2.00 | 75 % | 30 s\\* (plain) | 10.0 |"
    assert f"| statistics | n=10000 d=512 M=5000 C=10 float64 | {row}" in text
    assert "| solve | M=5 C=2 | 3 s |" in text
    line = "| statistics: n=10000 d=512 M=5000 C=10 float64 | ≥ 70 % of the limit's rate | 75 % | yes |"
    assert line in text
    assert "1 of 1 lines hold; not measured: " in text


def test_a_line_that_does_not_hold_is_told():
    (checked,) = [one for one in lines.check(results.of_json(result(slower(entry(), 1.5)), "made")) if one.measured]
    assert (checked.measured, checked.holds) == (0.5, False)
    assert "| 50 % | **no** |" in table.markdown(results.of_json(result(slower(entry(), 1.5)), "made"))


@pytest.mark.parametrize(
    ("kind", "beside", "bound", "measured"),
    [("limit", "", 2, 2), ("peer", "plain", 10, 10), ("seconds", "", 3, 3), ("value", "error", 1e-6, 1e-7)],
)
def test_a_line_takes_its_measurement_where_it_says(kind, beside, bound, measured):
    (case,) = results.of_json(result(entry(values={"error": 1e-7})), "made").cases.values()
    line = lines.Line(case.name, kind, bound, beside)
    assert line.measured(case) == pytest.approx(measured)
    assert line.holds(measured)
    assert not line.holds(measured * (0.5 if line.at_least else 100))
    assert lines.Line(case.name, kind, bound, "no such").measured(case) is None or kind == "seconds"


def written(path: Path, content: dict) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_comparing_tells_what_became_slower(tmp_path, capsys):
    other = entry("solve", {"M": 5, "C": 2})
    old = written(tmp_path / "old.json", result(entry(), other))
    assert compare.main([str(old), str(old)]) == 0
    assert "| same |" in capsys.readouterr().out
    # All sides alike: another machine.
    doubled = copy.deepcopy(result(entry(), other))
    for one in doubled["benchmarks"]:
        for side in one["extra_info"]["sides"]:
            side["seconds"] = [2 * second for second in side["seconds"]]
    assert compare.main([str(old), str(written(tmp_path / "slow.json", doubled))]) == 0
    new = written(tmp_path / "new.json", result(slower(entry(), 1.6), other))
    capsys.readouterr()
    assert compare.main([str(old), str(new)]) == 1
    out = capsys.readouterr().out
    assert "C=10 float64 | bare | 2.00 | 3.20 | 1.60 | **slower** |" in out
    assert "| solve: M=5 C=2 | bare | 2.00 | 2.00 | 1.00 | same |" in out
    assert compare.main([str(old), str(new), "--tolerance", "0.7"]) == 0
    assert compare.main([str(new), str(old)]) == 0
    assert "| faster |" in capsys.readouterr().out


def test_a_case_that_is_gone_fails_and_a_new_one_does_not(tmp_path, capsys):
    both = written(tmp_path / "both.json", result(entry(), entry("solve", {"M": 5, "C": 2})))
    one = written(tmp_path / "one.json", result(entry()))
    assert compare.main([str(both), str(one)]) == 1
    assert "**missing**" in capsys.readouterr().out
    assert compare.main([str(one), str(both)]) == 0
    assert "| new |" in capsys.readouterr().out


def without(key: str) -> dict:
    one = entry()
    del one["extra_info"][key]
    return result(one)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "no machine_info or benchmarks"),
        (result(), "has no case"),
        (without("name"), "benchmark 'bench_statistics' is none of the suite's: no 'name'"),
        (without("sides"), "no 'sides'"),
        (result(entry(), entry()), "twice"),
        (result(entry(sides=[])), "ours first"),
        (result(slower(entry(), 0)), "lacks seconds"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path, capsys, content, said):
    good = written(tmp_path / "good.json", result(entry()))
    bad = tmp_path / "bad.json"
    bad.write_text(content if isinstance(content, str) else json.dumps(content))
    assert compare.main([str(good), str(bad)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("compare: error: ")
    assert (said in error, error.count("\n"), str(bad) in error) == (True, 1, True)
    assert table_command.main([str(bad)]) == 2


def test_files_without_a_common_case_cannot_be_compared(tmp_path, capsys):
    files = [written(tmp_path / f"{M}.json", result(entry("solve", {"M": M, "C": 2}))) for M in (5, 6)]
    assert compare.main([*map(str, files)]) == 2
    assert compare.main([str(files[0]), str(tmp_path / "absent.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_result_file_has_no_path_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/here/some.py", "--state", "/tmp/own/kills.json", "--out", "benchmarks/measured"])
    report.write(tmp_path / "some.json", [{"a": 1}])
    command = json.loads((tmp_path / "some.json").read_text())["command"]
    assert command == "python -m benchmarks some --state kills.json --out benchmarks/measured"
