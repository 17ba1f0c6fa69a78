"""A track's board: who is marked, what has no place, why a row is not there; and its table on a terminal."""

from __future__ import annotations

import json

import pytest

from fcl_bench.leaderboard.board import board_of, print_board
from tests.leaderboard.rows import filled, right, row

#: AFL is 10 points ahead of STSA in every seed, and within its own spread of FedNCM.
AHEAD = [row(name, accuracy + seed / 10, seed) for name, accuracy in (("afl", 60), ("stsa", 50)) for seed in range(3)]
NEAR = [row("fedncm", 60.0 + (0.4, -0.3, 0.1)[seed], seed) for seed in range(3)]


def rows_of(store):
    return {(one["method"], one["kind"], one["setting"]): one for one in board_of(store)["rows"]}


def test_the_best_and_what_is_not_distinguishable_from_it_is_marked(tmp_path):
    found = rows_of(filled(tmp_path, *AHEAD, *NEAR))
    afl, stsa, fedncm = (found[name, "defaults", 0] for name in ("afl", "stsa", "fedncm"))
    assert (afl["mark"], fedncm["mark"], stsa["mark"]) == ("bold", "bold", "")
    assert stsa["behind"] == pytest.approx(10)
    assert fedncm["low"] < 0 < fedncm["high"]
    assert afl["A_T"] == pytest.approx(60.1)
    assert afl["curve"] == pytest.approx([90, 60.1])


@pytest.mark.parametrize(("first", "mark"), [(0, ""), (10, "bold")], ids=["a part of the same", "others"])
def test_answers_tell_whether_the_same_difference_in_every_seed_is_one_of_a_few_samples(tmp_path, first, mark):
    exact = [row(name, final, seed) for name, final in (("afl", 50.0), ("stsa", 47.0)) for seed in range(3)]
    store = filled(tmp_path, *exact)
    assert rows_of(store)["stsa", "defaults", 0]["mark"] == ""
    for seed in range(3):
        store.answers.put(f"afl{seed}", right(50.0))
        store.answers.put(f"stsa{seed}", right(47.0, first=first))
    stsa = rows_of(store)["stsa", "defaults", 0]
    assert stsa["mark"] == mark
    assert stsa["low"] < 3 < stsa["high"]


@pytest.mark.parametrize("why", ["ceiling", "gate"])
def test_ceilings_and_rows_with_a_gate_do_not_compete(tmp_path, why):
    name, gates = ("centralised_ridge", []) if why == "ceiling" else ("fedlda", ["rising"])
    best = [row(name, 99.0, seed, gates=gates, gate_texts="told" if gates else "") for seed in range(3)]
    found = rows_of(filled(tmp_path, *best, *AHEAD))
    assert found[name, "defaults", 0]["mark"] == ""
    assert found["afl", "defaults", 0]["mark"] == "bold"
    assert found[name, "defaults", 0]["gates"] == gates


def test_a_first_task_far_below_fedavgs_is_a_gate(tmp_path):
    poor = [row("stsa", 60.0, seed, accuracy=[30.0, 60.0]) for seed in range(3)]
    found = rows_of(filled(tmp_path, *poor, *(row("fedavg", 20.0, seed) for seed in range(3))))
    assert found["stsa", "defaults", 0]["gates"] == ["first_task"]
    assert (
        "seed 0: first_task (task 1): 30.0 % of its samples are right, FedAvg's 90.0 %"
        in (found["stsa", "defaults", 0]["gate_texts"])
    )


def test_what_was_not_run_is_named_with_the_reason(tmp_path):
    store = filled(tmp_path, *AHEAD[:2])
    store.about["not_run"] = {"dualprompt": "it needs images", "moon": "its run is that of fedavg"}
    found = rows_of(store)
    assert found["dualprompt", "defaults", 0]["why"] == "it needs images"
    assert found["afl", "defaults", 0]["why"] == "2 of 3 seeds are there"
    assert found["afl", "defaults", 1]["why"] == "not run yet"
    assert found["afl", "tuned", 0]["why"] == "its knobs have not been searched"
    assert {key for key in found if found[key]["A_T"] is not None} == {("afl", "defaults", 0)}
    assert found["afl", "defaults", 0]["n"] == 2
    assert not any(one["mark"] for one in found.values())  # a row that lacks a seed does not compete


def test_a_row_that_lacks_a_seed_is_shown_and_is_not_the_best(tmp_path):
    found = rows_of(filled(tmp_path, *AHEAD, row("fedncm", 99.0, 0)))
    assert (found["fedncm", "defaults", 0]["A_T"], found["fedncm", "defaults", 0]["mark"]) == (99.0, "")
    assert found["afl", "defaults", 0]["mark"] == "bold"


def test_the_command_of_a_row_has_what_the_search_chose(tmp_path):
    tuned = [row("afl", 61.0, seed, kind="tuned") for seed in range(3)]
    store = filled(tmp_path, *AHEAD, *tuned)
    store.about["tuned"] = {"afl": {"knobs": {"method.ridge": "0.5"}, "trials": 20}}
    found = rows_of(store)["afl", "tuned", 0]
    wanted = "fcl-bench -m track=mine method=afl clients=5 beta=0.1 method.ridge=0.5 data.path=FILE seed=0,1,2"
    assert found["command"] == wanted
    assert (found["tuning"], found["trials"]) == ({"method.ridge": "0.5"}, 20)


def test_defaults_compete_with_defaults_and_a_method_without_knobs_is_tuned_as_it_is(tmp_path):
    tuned = [row("stsa", 70.0 + seed / 10, seed, kind="tuned") for seed in range(3)]
    store = filled(tmp_path, *AHEAD, *tuned)
    store.about["tuned"] = {"stsa": {"knobs": {"method.gamma": "1"}}, "afl": {"knobs": {}}}
    found = rows_of(store)
    assert [found[key]["mark"] for key in (("afl", "defaults", 0), ("stsa", "defaults", 0))] == ["bold", ""]
    assert [found[key]["mark"] for key in (("afl", "tuned", 0), ("stsa", "tuned", 0))] == ["", "bold"]
    assert found["afl", "tuned", 0]["A_T"] == found["afl", "defaults", 0]["A_T"]
    assert found["afl", "tuned", 0]["behind"] == pytest.approx(10)


def test_a_board_is_json(tmp_path):
    assert json.loads(json.dumps(board_of(filled(tmp_path, *AHEAD)), allow_nan=False))["track"] == "mine"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    store = filled(tmp_path, *AHEAD, *(row("fedlda", 70.0, seed, gates=["rising"]) for seed in range(3)))
    store.about["not_run"] = {"dualprompt": "it needs images"}
    print_board(board_of(store))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in lines] == ["fedlda", "AFL", "STSA"]
    assert "70.00*" in lines[0]
    assert ("rising" in lines[0]) == (width >= 100)
    assert "not run: dualprompt: it needs images" in printed
