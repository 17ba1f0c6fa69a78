"""`fcl-bench rank`: a run's place among a track's rows, by how much, and what it does not share with them."""

from __future__ import annotations

import pytest

import fcl_bench
from fcl_bench.errors import UserError
from fcl_bench.leaderboard.store import Store, right_of, row_of
from fcl_bench.leaderboard.track import Track, shared_of
from tests.conftest import write_features
from tests.small_runs import run_in, settings_for

TYPED = ("tasks=2", "clients=2", "beta=0.5", "predictions=true")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of two seeds, and a folder with rows of a track of the same data."""
    out = tmp_path_factory.mktemp("rank")
    runs = {
        (method, seed): run_in(out, f"method={method}", f"seed={seed}", *TYPED)
        for method in ("afl", "fedncm")
        for seed in (0, 1)
    }
    settings = [{"clients": "2", "beta": "0.5"}]
    store = Store(out / "board", "features")
    store.describe(Track("features", "features-9", "Digits", settings, [0, 1], []), ["afl", "fedncm"])
    store.about["shared"] = [shared_of(settings_for(out, "method=afl", *TYPED))]
    for (method, seed), outcome in runs.items():
        store.require_data(outcome.record["data_fingerprint"])
        who = {"method": method, "kind": "defaults", "request": "r", **settings[0], "seed": seed}
        found = row_of(outcome.record, outcome.folder / "uploads.csv")
        store.put({**who, **found})
        store.answers.put(found["run_id"], right_of(outcome.folder, found["A_T"]))
    store.save()
    return out, {key: outcome.folder for key, outcome in runs.items()}


def test_runs_have_a_place_and_distances_with_intervals(made):
    out, folders = made
    found = fcl_bench.rank(folders["afl", 0], folders["afl", 1], track="features", out=out / "board")
    by_label = {row.label: row for row in found.rows}
    assert (found.track, found.place, found.differs) == ("features-9", 1, [])
    afl, fedncm = by_label["AFL"], by_label["FedNCM"]
    assert (afl.ahead, afl.low, afl.high) == (0, 0, 0)
    assert fedncm.ahead == pytest.approx(found.accuracy - fedncm.accuracy)
    assert fedncm.low <= fedncm.ahead <= fedncm.high
    worse = fcl_bench.rank(folders["fedncm", 0], folders["fedncm", 1], track="features", out=out / "board")
    mirrored = {row.label: row for row in worse.rows}["AFL"]
    assert (mirrored.ahead, mirrored.low, mirrored.high) == pytest.approx((-fedncm.ahead, -fedncm.high, -fedncm.low))
    assert worse.place == 2


def test_one_seed_has_an_interval_over_test_samples(made):
    out, folders = made
    found = fcl_bench.rank(folders["afl", 0], track="features", out=out / "board")
    fedncm = next(row for row in found.rows if row.label == "FedNCM")
    assert fedncm.low < fedncm.ahead < fedncm.high


def test_the_command_prints_the_place_and_what_differs(made, command, tmp_path):
    out, _ = made
    other = run_in(tmp_path, "method=afl", "label_rate=0.5", *TYPED[:3]).folder
    code, printed, told = command("rank", other, "--track", "features", "--board", out / "board")
    assert (code, told) == (0, "")
    assert printed.startswith("features-9, clients 2, beta 0.5: A_T ")
    assert "not the track's setting: label_rate: 0.5, the track has 1\n" in printed
    assert "predictions" not in printed
    assert "one seed" in printed
    assert "your runs" in printed


def test_the_track_is_found_by_the_data(made):
    out, folders = made
    assert fcl_bench.rank(folders["afl", 0], out=out / "board").track == "features-9"


def test_runs_of_other_data_have_no_place(made, tmp_path):
    out, _ = made
    file = write_features(tmp_path / "other.npz")
    other = run_in(tmp_path, "method=afl", "data=features", f"data.path={file}", *TYPED).folder
    with pytest.raises(UserError, match="are not those of the rows that are there"):
        fcl_bench.rank(other, track="features", out=out / "board")
    with pytest.raises(UserError, match="no track has rows of the data"):
        fcl_bench.rank(other, out=out / "board")


def test_runs_of_two_methods_are_refused(made):
    out, folders = made
    with pytest.raises(UserError, match="differ in more than their seed"):
        fcl_bench.rank(folders["afl", 0], folders["fedncm", 1], track="features", out=out / "board")


def test_an_edited_run_has_no_place(made, tmp_path):
    import shutil

    out, folders = made
    copied = shutil.copytree(folders["afl", 0], tmp_path / folders["afl", 0].name)
    record = (copied / "run.json").read_text()
    (copied / "run.json").write_text(record.replace('"A_T": ', '"A_T": 1'))
    with pytest.raises(UserError, match="is damaged: it has a damaged run.json"):
        fcl_bench.rank(copied, track="features", out=out / "board")
