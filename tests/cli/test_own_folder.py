"""Choices in a folder of one's own: every command finds them, wherever its option stands."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.conftest import write_features
from tests.small_runs import run_in

SMALL = ("method.M=16", "tasks=2", "clients=2", "cache.enabled=false")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a method `ours`, which extends stsa, and a data set `mine`."""
    (tmp_path / "own" / "method").mkdir(parents=True)
    text = "# Ours, in a line\n# Paper: us\ndefaults: [stsa, _self_]\ngamma: 3.0  # how much\n"
    (tmp_path / "own" / "method" / "ours.yaml").write_text(text)
    (tmp_path / "own" / "data").mkdir()
    file = write_features(tmp_path / "features.npz")
    (tmp_path / "own" / "data" / "mine.yaml").write_text(f"# Mine\ndefaults: [features, _self_]\npath: {file}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own"


#: The ways to name the folder.
WAYS = ["--config-dir {}", "--config-dir=own", "-cd {}"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [True, False])
def test_show_describes_a_choice_of_ones_own(command, own, way, first):
    folder, words = way.format(own).split(), ["show", "method=ours"]
    code, out, err = command(*(folder + words if first else words + folder))
    assert (code, err) == (0, "")
    assert "  Ours, in a line\n" in out
    assert "  paper: us\n" in out
    assert "  method.gamma=3.0 " in out
    assert "  method.M=2048 " in out
    # The example is the whole command.
    assert shlex.split(out.splitlines()[-1]) == [
        "fcl-bench",
        *way.format(own).replace("dir=", "dir ").split(),
        "method=ours",
    ]


def test_lists_and_help_have_the_choices_of_ones_own(command, own):
    assert "  ours " in command("show", "method", "--config-dir", own)[1]
    _, out, _ = command("--config-dir", own, "--help")
    assert re.search(r"^     ours +Ours, in a line$", out, re.MULTILINE)
    assert re.search(r"^     mine +Mine$", out, re.MULTILINE)
    assert command("--config-dir", own, "method=ours", "--help")[1].startswith("method=ours\n  Ours, in a line\n")
    # Of the next command of the process they are not.
    assert " ours " not in command("--help")[1]


@pytest.mark.slow_cases("--config-dir {}")
@pytest.mark.parametrize("way", WAYS[:1])
def test_tune_searches_a_method_of_ones_own(command, own, way):
    pytest.importorskip("optuna")
    folder = way.format(own).split()
    typed = ("method=ours", "data=mine", "method.gamma=log(1,10)", "seed=0", *SMALL, "out=out", "--trials", "1")
    code, out, err = command(*folder, "tune", *typed)
    assert (code, err) == (0, "")
    [best] = [shlex.split(line.removeprefix("best: ")) for line in out.splitlines() if line.startswith("best: ")]
    assert best[: 1 + len(folder)] == ["fcl-bench", *folder]
    code, out, _ = command(*best[1:])
    assert code == 0
    assert "this run is complete already" in out


@pytest.mark.slow
def test_predict_reads_a_data_set_of_ones_own(command, own):
    file = f"data.path={own.parent / 'features.npz'}"
    run = run_in(own.parent / "out", "method=stsa", "data=features", file, *SMALL).folder
    code, expected, _ = command("predict", run, "data=features", file)
    assert code == 0
    for way in WAYS:
        assert command("predict", run, "data=mine", *way.format(own).split())[:2] == (0, expected)


def test_the_data_sets_of_ones_own_are_prepared(in_process, own):
    from fcl_bench.cli.data import main

    code, out, err = in_process(main, "fcl-bench-data", "prepare", "mine", "--config-dir", own)
    assert (code, err) == (0, "")
    assert " is ready: " in out


@pytest.mark.slow_cases("--config-dir {}")
@pytest.mark.parametrize("way", WAYS[:1])
def test_the_command_of_a_failed_job_finds_the_choice_again(command, own, way):
    folder = way.format(own).split()
    code, out, _ = command("-m", *folder, "method=ours", "data=mine", "beta=-1,1", *SMALL, "out=out")
    assert code == 2
    [line] = [line.strip() for line in out.splitlines() if line.startswith("    fcl-bench ")]
    assert shlex.split(line)[: 1 + len(folder)] == ["fcl-bench", *folder]
    code, _, err = command(*shlex.split(line)[1:])
    assert (code, err) == (2, "fcl-bench: error: beta=-1.0 is out of range (a finite number above 0)\n")


@pytest.mark.slow
def test_a_job_of_a_sweep_that_does_not_compose_names_the_keys_of_its_choice(command, own):
    typed = ("method=ours,fedncm", "method.similarity=cosine", *SMALL[1:], "out=out")
    code, _, err = command("-m", "--config-dir", own, *typed)
    assert code == 2
    assert "unknown key method.similarity: it belongs to fedncm (method=ours has M, " in err
