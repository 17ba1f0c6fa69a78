"""`track=NAME`: the stream and the budget that all methods of a leaderboard share."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import yaml

import fcl_bench
from fcl_bench.cli.knobs import owners
from fcl_bench.composition import choices_of, composed, config_dir
from fcl_bench.config import load_settings
from fcl_bench.errors import UserError

TRACKS = choices_of("track")
#: Without the file of weights that a track leaves to whoever runs it.
GIVEN = {"transformer": ["backbone.pretrained=false"]}


@functools.cache
def settings_of(track: str, method: str, *typed: str):
    return load_settings(composed([f"track={track}", f"method={method}", *GIVEN.get(track, []), *typed]))


@pytest.mark.slow
@pytest.mark.parametrize("track", TRACKS)
def test_a_track_sets_the_stream_and_names_its_version(track):
    scalars = settings_of(track, "afl").scalars
    name, _, version = scalars.track.rpartition("-")
    assert name == track
    assert version.isdigit()
    assert settings_of(track, "fedavg").data.name == settings_of(track, "afl").data.name
    assert "track" not in settings_of(track, "afl").identity()


@pytest.mark.slow
@pytest.mark.parametrize("track", TRACKS)
def test_every_method_that_trains_gets_the_budget_of_the_track(track):
    """Some have no place in a track: they say so in one line that names a key."""
    # As written here, so that a change of a track's budget has to be made on purpose, with a new version.
    rounds = {"features": 20, "features-imbalanced": 20, "features-siblurry": 20, "scratch": 20, "transformer": 5}
    within, refused = set(), {}
    for method in owners("method", "training.augment"):
        try:
            found = settings_of(track, method)
        except UserError as error:
            refused[method] = str(error)
        else:
            assert found.method.training.rounds == rounds[track]
            within.add(method)
    assert all("=" in reason for reason in refused.values())
    assert {"fedavg", "fedprox", "feddyn", "scaffold", "fedewc", "fedicarl"} <= within


@pytest.mark.slow
def test_what_is_typed_wins_over_the_budget():
    typed = settings_of("features", "fedavg", "method.training.rounds=3", "tasks=4")
    assert (typed.method.training.rounds, typed.method.training.epochs, typed.scalars.tasks) == (3, 2, 4)


@pytest.mark.slow
def test_a_track_that_builds_on_another_takes_its_budget_over():
    assert settings_of("features-siblurry", "fedavg").method == settings_of("features", "fedavg").method
    assert settings_of("features-siblurry", "afl").split.name == "si_blurry"


def test_a_track_changes_nothing_where_it_is_not_chosen():
    assert load_settings(composed(["method=fedavg"])).method.training.rounds == 50


@pytest.fixture
def own(tmp_path):
    """A folder with a track of one's own, and features for it."""
    folder = tmp_path / "conf" / "track"
    folder.mkdir(parents=True)
    track = {"defaults": [{"override /data": "features"}, {"override /split": "class_incremental"}], "track": "mine-2"}
    budget = {
        "training": {"method.trains": "features", "method.training.rounds": 1, "method.training.epochs": 1},
        "fedprox": {"method.mu": 0.5, "method.training.rounds": 2},
        "afl": {"method.ridge": 7},
    }
    text = yaml.safe_dump({**track, "tasks": 2, "clients": 2, "budget": budget}, sort_keys=False)
    (folder / "mine.yaml").write_text("# @package _global_\n# Mine\n" + text)
    draws = np.random.default_rng(0)
    data = {f"x_{part}": draws.normal(size=(40, 6)).astype(np.float32) for part in ("train", "test")}
    np.savez(tmp_path / "F.npz", **data, y_train=np.arange(40) % 4, y_test=np.arange(40) % 4)
    return tmp_path


@pytest.mark.slow
def test_a_track_of_ones_own_is_one_file(own, command):
    """Its `training` goes to methods that train, and a method's own entry to that method, over it."""
    for method, expected in (("fedavg", (1, None)), ("fedprox", (2, 0.5)), ("afl", (None, None))):
        typed = ["track=mine", f"method={method}", f"data.path={own / 'F.npz'}", f"out={own / 'out'}", "device=cpu"]
        code, _, err = command("--config-dir", str(own / "conf"), *typed)
        assert code == 0, err
        record = json.loads(next((own / "out" / "runs").glob(f"{method}-*/run.json")).read_text())
        chosen = yaml.safe_load(next((own / "out" / "runs").glob(f"{method}-*/config.yaml")).read_text())["method"]
        assert record["track"] == "mine-2"
        assert (chosen.get("training", {}).get("rounds"), chosen.get("mu")) == expected
    assert fcl_bench.runs(out=str(own / "out")).track.tolist() == ["mine-2"] * 3


@pytest.mark.slow
def test_tune_needs_a_track_and_a_method_alone(own, command):
    typed = ["track=mine", "method=afl", f"data.path={own / 'F.npz'}", f"out={own / 'out'}", "device=cpu"]
    code, out, err = command("tune", "--config-dir", str(own / "conf"), "--trials", "2", *typed)
    assert code == 0, err
    assert "track=mine" in out.split("best: ")[1]


def test_an_unknown_track_is_one_line_with_those_there_are(command):
    code, _, err = command("track=featurs", "method=afl")
    assert code == 2
    assert err.startswith("fcl-bench: error: track=featurs is not known (did you mean features")
    assert all(track in err for track in TRACKS)


def test_each_track_says_what_it_is_and_a_command():
    for track in TRACKS:
        lines = (config_dir() / "track" / f"{track}.yaml").read_text().splitlines()
        assert lines[0] == "# @package _global_"
        assert lines[2].startswith(f"# Example: fcl-bench -m track={track} ")
