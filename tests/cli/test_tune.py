"""`fcl-bench tune`: ranges, a study that goes on, pruning, and trials that are ordinary runs."""

from __future__ import annotations

import json
import re
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from fcl_bench.composition import config_dir
from fcl_bench.errors import UserError
from fcl_bench.execution import run as running
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.sweeps.search import Range, parse_range
from tests.small_methods import NAMES, class_of, trains_by_gradient
from tests.small_runs import interrupt_at

TYPED = ("method=stsa", "method.M=16", "tasks=2", "clients=2", "method.gamma=log(1e-3,1e5)")


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("a=log(1e-4,1)", ("a", Range("log", ("1e-4", "1")))),
        ("a.b=uniform(0, 1)", ("a.b", Range("uniform", ("0", "1")))),
        ("a=int_log(8,512)", ("a", Range("int_log", ("8", "512")))),
        ("a=choice(x,y)", ("a", Range("choice", ("x", "y")))),
        ("a=1,2", ("a", Range("choice", ("1", "2")))),
        ("a=x..y", None),
        ("a=[1,2]", None),
        ("a=3", None),
    ],
)
def test_ranges_as_they_are_typed(typed, found):
    assert parse_range(typed) == found


@pytest.mark.parametrize(
    "typed",
    [
        "a=log(0,1)",
        "a=log(1,0.1)",
        "a=int(0.5,2)",
        "a=uniform(1)",
        "a=log(1,x)",
        "a=uniform(2,2)",
        "a=int(1,inf)",
        "a=log(1,inf)",
    ],
)
def test_what_is_no_range_is_told(typed):
    with pytest.raises(UserError, match="is no range"):
        parse_range(typed)


def test_a_range_in_another_form_is_told_in_ours():
    with pytest.raises(
        UserError, match=re.escape("a=1e0..1e6 is no range (did you mean 'a=log(1,1e6)'? Others: log(1e-4,1),")
    ):
        parse_range("a=1e0..1e6")


def test_values_are_in_their_ranges():
    optuna = pytest.importorskip("optuna")
    trial = optuna.trial.FixedTrial({"a": 0.123456, "b": 64, "c": "x", "d": 0.5})
    assert Range("log", ("1e-4", "1")).suggested(trial, "a") == "0.123"
    assert Range("int_log", ("8", "512")).suggested(trial, "b") == "64"
    assert Range("choice", ("x", "y")).suggested(trial, "c") == "x"
    assert [Range("choice", ("null", "0.10")).has(typed) for typed in ("null", "0.1", "2048")] == [True, True, False]
    assert [Range("log", ("1e-4", "1")).has(typed) for typed in ("0.0001", "1", "2", "null")] == [
        True,
        True,
        False,
        False,
    ]
    assert Range("uniform", ("0", "1")).suggested(trial, "d") == "0.5"
    assert Range("uniform", ("0.1234", "0.1235")).suggested(optuna.trial.FixedTrial({"a": 0.123456}), "a") == "0.1235"
    assert Range("log", ("0.123451", "0.123456")).suggested(optuna.trial.FixedTrial({"a": 0.123456}), "a") == "0.123456"


def test_without_optuna_one_line_says_so(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, out, err = command("tune", *TYPED, f"out={tmp_path}/out")
    assert (code, out) == (2, "")
    assert err == (
        "fcl-bench: error: fcl-bench tune needs optuna, which is not installed "
        "(in the checkout of fcl-bench: pip install '.[tune]')\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("method=fedncm",), "tune has nothing to search: method=fedncm declares no knob of its own"),
        ((*TYPED, "--on-test", "data.validation=0.2"), "tune says itself what trials are tested on (--on-test"),
        ((*TYPED, "data.test=true"), "tune says itself what trials are tested on (--on-test"),
        (
            ("method=stsa", "method.gamma=1e0..1e6"),
            "method.gamma=1e0..1e6 is no range (did you mean 'method.gamma=log(1,1e6)'?",
        ),
        ((*TYPED, "--trials", "0"), "--trials 0 is out of range"),
        ((*TYPED, "--metric", "A_avgg"), "did you mean A_avg"),
        ((*TYPED, "--study", "a/b"), "--study a/b is not a plain name"),
        ((*TYPED, "--study", ".."), "--study .. is not a plain name"),
        ((f"method={'x' * 300}", "method.gamma=log(1,2)"), "is not known (one of "),
        ((*TYPED, "--nope"), "unrecognized arguments: --nope"),
        (("method=stsa", "method.gamm=log(1,2)"), "unknown key method.gamm"),
        (("method=stsa", "method.gamma=log(1,2)", "clients=0"), "clients=0 is out of range"),
        ((*TYPED, "transport=ranks"), "tune with transport=ranks: every rank would be a search of its own"),
    ],
)
def test_wrong_input_is_one_line_and_nothing_is_written(command, tmp_path, typed, told):
    pytest.importorskip("optuna")
    code, out, err = command("tune", *typed, f"out={tmp_path}/out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert list(tmp_path.iterdir()) == []


def runs(folder):
    return sorted(path.parent.name for path in (folder / "runs").glob("*/run.json"))


@pytest.mark.slow
def test_trials_are_runs_and_the_same_command_goes_on(command, tmp_path):
    pytest.importorskip("optuna")
    arguments = ("tune", *TYPED, f"out={tmp_path}", "seed=0,1", "--no-pruning")
    code, out, err = command(*arguments, "--trials", "2")
    assert (code, err) == (0, "")
    assert len(runs(tmp_path)) == 4
    assert "trial 2 of 2: A_avg " in out
    [study] = (tmp_path / "studies").glob("*.journal")
    line = next(line for line in out.splitlines() if line.startswith("tables of these runs: "))
    assert f"--sweep {study.stem}" in line
    reports = [json.loads(path.read_text()) for path in (tmp_path / "sweeps" / study.stem / "jobs").glob("*.json")]
    assert sorted(report["run"].rpartition("/")[2] for report in reports) == runs(tmp_path)
    # The value of a trial is the mean over its seeds, and the best is the highest.
    best = next(line for line in out.splitlines() if line.startswith("best: "))
    gamma = next(word for word in best.split() if word.startswith("method.gamma="))
    values = {}
    for report in reports:
        record = json.loads((tmp_path / "runs" / report["run"].rpartition("/")[2] / "run.json").read_text())
        values.setdefault(report["overrides"][-2], []).append(record["metrics"]["A_avg"])
    means = {key: sum(found) / len(found) for key, found in values.items()}
    assert means[gamma] == max(means.values())
    # Nothing is done again, and a third trial is another point.
    code, out, _ = command(*arguments, "--trials", "3")
    assert code == 0
    assert "2 of 3 trials are there already" in out
    assert out.count("trial 3 of 3: ") == 1
    assert len(runs(tmp_path)) == 6
    # The command of the best reports its run.
    code, out, _ = command(*best.removeprefix("best: fcl-bench ").split())
    assert code == 0
    assert out.count("was complete already") == 2


def test_trials_are_tested_on_validation_samples_of_a_seed_of_their_own(command, tmp_path):
    pytest.importorskip("optuna")
    code, out, _ = command("tune", *TYPED, f"out={tmp_path}", "--trials", "1")
    assert code == 0
    [path] = (tmp_path / "runs").glob("*/run.json")
    record = json.loads(path.read_text())
    assert (record["validation"]["replaces_test"], record["seed"]) == (True, 1000)
    again = next(line for line in out.splitlines() if line.startswith("with all training samples, on the test set: "))
    assert again.endswith("seed=0,1,2")
    assert "data." not in again
    [choice] = (tmp_path / "studies").glob("*.yaml")
    found = yaml.safe_load(choice.read_text())
    # The first trial has the defaults.
    assert found["method"] == {"gamma": 10000}
    assert f"method.gamma={found['method']['gamma']:g}" in again or str(found["method"]["gamma"]) in again
    assert "on validation samples, seed 1000, trial 0" in choice.read_text()


SMALL = ("tune", "data=digits", "tasks=2", "clients=2")


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        (("method=afl,fedncm",), "method="),  # another one is the default
        (("method=stsa,stsa_e", "method.gamma=1", "method.M=16"), "method=stsa"),  # which has no gamma
        (("method=stsa", "method.M=16", "partition=dirichlet,iid"), "partition=dirichlet:"),
        (("method=stsa", "method.M=null,16"), "method.M="),  # 2048 is no choice
        (("method=stsa", "method.M=int(8,16)"), "method.M="),
        (("method=afl",), "method.ridge=0 "),  # below the range that the method declares itself
    ],
)
def test_only_what_is_in_the_ranges_is_tried(command, tmp_path, typed, first):
    """A group begins with its default choice; a default that is out of its range can't win."""
    pytest.importorskip("optuna")
    code, out, err = command(*SMALL, *typed, f"out={tmp_path}", "--trials", "1")
    assert (code, err) == (0, "")
    [trial] = [line.partition(": ")[2] for line in out.splitlines() if line.startswith("trial 1 of 1: ")]
    assert first in trial.replace("  [", ":")
    assert "2048" not in trial


def test_defaults_that_fail_do_not_end_a_search(command, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    typed = (*SMALL, "method=stsa", "method.M=16", "method.gamma=1e4,1", f"out={tmp_path}")
    run, refused = running.run, [1e4]

    def refusing(settings, tracking):
        if settings.method.gamma in refused:
            raise UserError("it is refused", "another")
        return run(settings, tracking)

    monkeypatch.setattr(running, "run", refusing)
    code, out, err = command(*typed, "--trials", "1")
    assert (code, err.count("\n")) == (2, 1)
    assert "no trial of the study" in err
    code, out, _ = command(*typed, "--trials", "4")
    assert code == 0
    assert "1 of 4 trials are there already" in out
    assert "method.gamma=1  " in out
    refused.append(1)
    code, _, err = command(*typed, "beta=0.7", "--trials", "4")
    assert code == 2
    assert "it is refused" in err


def test_a_choice_by_the_test_set_says_so(command, tmp_path):
    pytest.importorskip("optuna")
    code, out, _ = command("tune", *TYPED, f"out={tmp_path}", "--trials", "1", "--on-test")
    assert code == 0
    assert "A_avg is measured on the test set: say so" in out
    [choice] = (tmp_path / "studies").glob("*.yaml")
    assert "THE TEST SET, which chose these values" in choice.read_text()


def test_without_a_range_the_methods_own_knobs_are_searched(command, tmp_path):
    pytest.importorskip("optuna")
    code, out, _ = command("tune", "method=stsa", "method.M=16", "tasks=2", f"out={tmp_path}", "--trials", "1")
    assert code == 0
    assert STSA.search_space()
    for key in STSA.search_space():
        assert f"method.{key}=" in out


@pytest.mark.slow
def test_an_exact_tie_is_called_one(command, tmp_path):
    """AFL removes its clients' regularisers, so gamma changes no answer."""
    pytest.importorskip("optuna")
    typed = ("tune", "method=afl", "data=digits", "tasks=2", "clients=2", f"out={tmp_path}", "--no-pruning")
    code, out, _ = command(*typed, "method.gamma=1,2", "--trials", "6")
    assert code == 0
    assert "an exact tie: 2 choices have this A_avg; the first is called the best below" in out


@pytest.mark.slow
def test_a_trial_that_an_interrupt_ended_is_asked_again(command, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    arguments = ("tune", *TYPED, f"out={tmp_path}", "--trials", "2")
    with interrupt_at(1, monkeypatch):
        code, _, err = command(*arguments)
    assert code == 130
    assert "the same command goes on" in err
    [begun] = [path.name for path in (tmp_path / "runs").iterdir() if path.name != ".locks"]
    code, out, _ = command(*arguments)
    assert code == 0
    assert len(runs(tmp_path)) == 2
    assert begun in runs(tmp_path)
    assert "2 complete, 0 pruned, 0 failed" in out


def test_a_study_of_something_else_is_refused(command, tmp_path):
    pytest.importorskip("optuna")
    mine = ("--study", "mine", "--trials", "1", f"out={tmp_path}")
    assert command("tune", *TYPED, *mine)[0] == 0
    code, _, err = command("tune", *TYPED, "beta=0.7", *mine)
    assert code == 2
    assert "--study mine searches something else" in err


def test_trials_that_fall_behind_are_pruned_in_the_second_half_of_their_tasks():
    """Optuna's own rule would look at the best accuracy so far, that after the first task, and end none of these."""
    optuna = pytest.importorskip("optuna")
    from fcl_bench.sweeps.search import Pruning
    from fcl_bench.tracking import NoTracking, TrackedRun

    study = optuna.create_study(direction="maximize")
    started = TrackedRun("id", "label", {}, None, 0, False)  # type: ignore[arg-type]

    def learn(*accuracies: float) -> None:
        trial = study.ask()
        tracker = Pruning(trial, 4, len(accuracies), NoTracking()).start(started)
        try:
            for task, accuracy in enumerate(accuracies):
                tracker.task({"accuracy": accuracy}, task)
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            raise
        tracker.task({}, len(accuracies))  # where nothing is tested, nothing is told
        tracker.close()
        study.tell(trial, accuracies[-1])

    for run in ((90.0, 70.0, 60.0), (92.0, 60.0, 50.0), (94.0, 80.0, 70.0), (80.0, 40.0, 10.0)):
        learn(*run)
    assert study.trials[0].intermediate_values == {4: 90.0, 5: 70.0, 6: 60.0}
    learn(1.0, 65.0, 55.0)  # far behind after the first task, then exactly the medians
    with pytest.raises(optuna.TrialPruned, match=r"after task 2, at 64\.99 %"):
        learn(99.0, 64.99, 99.0)
    with pytest.raises(optuna.TrialPruned, match=r"after task 3, at 54\.99 %"):
        learn(99.0, 99.0, 54.99)


@pytest.mark.parametrize("name", [name for name in NAMES if class_of(name).search_space()])
def test_every_method_declares_ranges_of_knobs_that_it_has(name):
    node = OmegaConf.load(config_dir() / "method" / "_gradient.yaml") if trains_by_gradient(name) else {}
    node = OmegaConf.merge(node, OmegaConf.load(config_dir() / "method" / f"{name}.yaml"))
    for key, values in class_of(name).search_space().items():
        assert parse_range(f"method.{key}={values}"), key
        assert OmegaConf.select(node, key, default="absent") != "absent", key


def test_only_a_method_without_a_knob_that_matters_declares_none():
    assert [name for name in NAMES if not class_of(name).search_space()] == ["fedncm"]
