"""The rows of a track: what is written is read again, the order of work does not show, wrong data is refused."""

from __future__ import annotations

import itertools

import pytest

from fcl_bench.errors import UserError
from fcl_bench.leaderboard.store import Store, row_of, stored
from tests.leaderboard.rows import filled, right, row, track
from tests.small_runs import run_in

ROWS = [row("afl", 50.123456789, seed) for seed in (0, 1, 10)] + [row("stsa", 60.0, 0, gates=["rising", "chance"])]


def test_what_is_written_is_read_again(tmp_path):
    written = filled(tmp_path, *ROWS)
    written.save()
    read = Store(tmp_path, "mine")
    assert read.rows == written.rows
    assert read.about == written.about
    assert read.row("afl", "defaults", "of-afl", {"clients": "5", "beta": "0.1"}, 10)["A_T"] == 50.123456789
    assert read.row("afl", "defaults", "other knobs", {"clients": "5", "beta": "0.1"}, 10) is None
    assert read.row("afl", "tuned", "of-afl", {"clients": "5", "beta": "0.1"}, 10) is None


def test_answers_are_read_again_and_go_with_their_rows(tmp_path):
    written = filled(tmp_path, row("afl", 50.0, 0), row("stsa", 60.0, 0))
    for run, answers in (("afl0", right(50.0)), ("stsa0", right(60.0, samples=13)), ("gone", right(10.0))):
        written.answers.put(run, answers)
    written.save()
    before = (tmp_path / "mine.npy").read_bytes()
    read = Store(tmp_path, "mine")
    assert [run in read.answers for run in ("afl0", "stsa0", "gone")] == [True, True, False]
    samples, shares = read.answers.shares("A_T", 50.0, "afl0")
    assert samples.tolist() == list(range(200))
    assert shares.tolist() == [0.5] * 100 + [0.0] * 100
    assert read.answers.shares("A_T", 51.0, "afl0") is None, "answers to something else"
    assert read.answers.shares("A_avg", 50.0, "afl0") is None
    assert len(read.answers.shares("A_T", 100 * 8 / 13, "stsa0")[1]) == 13
    read.save()
    assert (tmp_path / "mine.npy").read_bytes() == before


def test_a_row_without_answers_is_made_again_where_the_track_keeps_them(tmp_path):
    store, where = filled(tmp_path, row("afl", 50.0, 0)), {"clients": "5", "beta": "0.1"}
    assert store.row("afl", "defaults", "of-afl", where, 0)
    store.about["shared"] = [{"predictions": True}]
    assert store.row("afl", "defaults", "of-afl", where, 0) is None
    store.answers.put("afl0", right(50.0))
    assert store.row("afl", "defaults", "of-afl", where, 0)


def test_damaged_answers_are_one_line(tmp_path):
    store = filled(tmp_path, row("afl", 50.0, 0))
    store.answers.put("afl0", right(50.0))
    store.save()
    file = tmp_path / "mine.npy"
    for content in (file.read_bytes()[:-7], b"", b"text", file.read_bytes()[:20]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"mine\.npy is damaged: .+ \(a copy of it, or another --out\)"):
            Store(tmp_path, "mine")


def test_the_order_in_which_runs_end_does_not_show(tmp_path):
    contents = set()
    for number, order in enumerate(itertools.permutations(ROWS, len(ROWS))):
        filled(tmp_path / str(number), *order).save()
        contents.add((tmp_path / str(number) / "mine.csv").read_bytes())
    assert len(contents) == 1


def test_a_newer_run_takes_the_place_of_an_older_one(tmp_path):
    store = filled(tmp_path, row("afl", 50.0, 0), row("afl", 51.0, 0, request="new knobs"))
    assert [one["A_T"] for one in store.rows] == [51.0]


def test_rows_of_another_version_of_the_track_go(tmp_path):
    store = filled(tmp_path, row("afl", 50.0, 0))
    store.about["tuned"]["afl"] = {"knobs": {"method.ridge": "1"}}
    store.describe(track("mine-2"), ["afl"])
    assert (store.rows, store.about["tuned"], store.about["version"]) == ([], {}, "mine-2")


def test_a_command_that_names_no_data_leaves_the_key_that_a_row_needs(tmp_path):
    store = filled(tmp_path, *ROWS)
    without = track()
    without.typed.clear()
    store.describe(without, ["afl"])
    assert store.about["typed"] == ["data.path=FILE"]


def test_rows_of_other_data_are_refused(tmp_path):
    store = filled(tmp_path)
    store.require_data("one")
    store.require_data("one")
    with pytest.raises(UserError, match=r"these data \(two\) are not those of the rows that are there \(one\)"):
        store.require_data("two")


@pytest.mark.parametrize("damage", ["cut", "no YAML", "not a number", "YAML cut", "YAML of something else"])
def test_damaged_files_are_one_line(tmp_path, damage):
    filled(tmp_path, *ROWS).save()
    rows, about = tmp_path / "mine.csv", tmp_path / "mine.yaml"
    match damage:
        case "cut":
            rows.write_text(rows.read_text()[:-120])
        case "no YAML":
            about.unlink()
        case "not a number":
            rows.write_text(rows.read_text().replace("50.123456789", "nan", 1))
        case "YAML cut":
            about.write_text("x: [")
        case "YAML of something else":
            about.write_text("x: 1")
    with pytest.raises(
        UserError, match=r"mine\.csv and mine\.yaml are damaged: .+ \(a copy of both, or another --out\)"
    ):
        Store(tmp_path, "mine")


def test_uncommitted_changes_show(tmp_path):
    outcome = run_in(tmp_path, "method=afl", "tasks=2", "clients=2")
    outcome.record["environment"]["git_commit"] = "0123456789abcdef-dirty"
    assert row_of(outcome.record, outcome.folder / "uploads.csv")["git_commit"] == "0123456789ab-dirty"


def test_no_path_of_this_machine_is_stored(tmp_path):
    filled(tmp_path, *ROWS).save()
    assert "/home/me" not in (tmp_path / "mine.yaml").read_text()


def test_a_track_without_rows_says_so(tmp_path):
    with pytest.raises(UserError, match=r"track mine has no rows in"):
        stored("mine", tmp_path)


def test_a_row_says_what_its_run_says(tmp_path):
    outcome = run_in(tmp_path, "method=afl", "tasks=2", "clients=2")
    found = row_of(outcome.record, outcome.folder / "uploads.csv")
    record = outcome.record
    assert found["A_T"] == record["metrics"]["A_T"]
    assert found["accuracy"] == record["metrics"]["accuracy"]
    assert found["up_total_max_mib"] == record["communication"]["up_total_max_bytes"] / 2**20
    assert found["rounds"] == 2  # one round per task
    assert found["run_id"] == record["run_id"]
    # Half of the digits' test samples are of the first of two tasks.
    assert 150 < found["first_samples"] < 220
