"""The benchmark suite and the scripts beside it, run at their smallest."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import compare
import gpu_lines
import network_choices
import pytest
import table as table_command
import torch
from suite import children, lines, results, table
from suite.bench_methods import METHODS
from suite.sides import case_name

from fcl_bench.backbones import network_extractor
from tests.conftest import REPOSITORY, write_features

SUITE = REPOSITORY / "benchmarks" / "suite"


def cases_of_the_suite() -> dict[str, str]:
    """The names of all cases, and the stage of each."""
    names = {}
    for file in sorted(SUITE.glob("bench_*.py")):
        module = importlib.import_module(f"suite.{file.stem}")
        for name, function in vars(module).items():
            for cases in getattr(function, "cases", {}).values():
                stage = name.removeprefix("bench_")
                names.update({case_name(stage, case): stage for case in cases})
    return names


def test_every_line_has_its_case():
    names = cases_of_the_suite()
    assert [line.case for line in lines.LINES if line.case not in names] == []


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[Path, str]:
    """The JSON and the output of the suite at its smallest, in a process of its own."""
    folder = tmp_path_factory.mktemp("bench")
    file = folder / "made" / "smoke.json"
    # What needs timm or starts processes takes longer than all others together.
    slow = ("extraction", "memory", "whole_run")
    ignored = [f"--ignore={SUITE / f'bench_{name}.py'}" for name in slow]
    options = ["--size", "smoke", "--rounds", "2", f"--benchmark-json={file}"]
    # One that took itself for a worker of these tests' would not measure.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(SUITE), *ignored, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return file, done.stdout


@pytest.mark.slow
def test_the_suite_runs_and_writes_its_table(smoke, capsys):
    file, out = smoke
    found = results.load(file)
    stages = set(cases_of_the_suite().values())
    elsewhere = {"extraction", "memory_fedran", "memory_clients", "whole_run", "start_up"}
    assert {case.stage for case in found.cases.values()} == stages - elsewhere
    assert all(len(case.ours.seconds) == 2 for case in found.cases.values())
    ours_ = found.machine["fcl_bench"]
    assert (ours_["size"], ours_["threads"] >= 1, ours_["torch"]) == ("smoke", True, torch.__version__.split("+")[0])
    text = file.with_suffix(".md").read_text()
    assert text == table.markdown(found)
    assert text in out
    assert "warning" not in out.lower()
    assert table_command.main([str(file)]) == 0
    assert capsys.readouterr().out == text
    assert compare.main([str(file), str(file)]) == 0


@pytest.mark.slow
def test_every_line_names_a_side_that_its_stage_has(smoke):
    """By the smallest case of the stage."""
    stages = cases_of_the_suite()
    smallest = {case.stage: case for case in results.load(smoke[0]).cases.values()}
    checked = 0
    for line in lines.LINES:
        case = smallest.get(stages[line.case])
        if case is not None:
            assert line.measured(case) is not None, line
            checked += 1
    assert checked > 10


def test_the_gpu_script_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    extraction = gpu_lines.Measured("extraction", 0.1, gpu_lines.EXTRACTION, True)
    monkeypatch.setattr(gpu_lines, "extraction", lambda *_: [extraction])
    rounds = gpu_lines.Measured("rounds", 0.1, gpu_lines.KERNELS, True)
    monkeypatch.setattr(gpu_lines, "rounds", lambda *_: [rounds])
    assert gpu_lines.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "gpu-lines-cpu.json").read_text())["rows"]
    assert len(told) == 2 + 2 + len(METHODS)
    assert [line["holds"] for line in told if "scores" in line["what"]] == [True] * len(METHODS)
    assert "| extraction | ≥ 0.9 | 0.1 | **no** |" in capsys.readouterr().out


@pytest.mark.slow
def test_compiled_networks_are_measured_beside_those_as_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(network_extractor, "BACKEND", "eager")
    small = ["--device", "cpu", "--backbone", "tiny", "--batch", "4", "--batches", "1", "--rounds", "1"]
    assert network_choices.main([*small, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "network-choices-tiny-cpu.json").read_text())["rows"]
    for kind in (network_choices.EXTRACTION, network_choices.TRAINING):
        told = {row["network"]: row for row in rows if row["work"] == kind}
        assert told.keys() == {"as it is", "compiled"}
        assert told["as it is"]["gain"] == 1
        assert told["compiled"]["gain"] > 0
        assert told["compiled"]["difference"] == 0  # that backend runs what was captured as it is
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert network_choices.choices(torch.device("cpu")).keys() == {"as it is"}
    assert "no-such-compiler is not there" in capsys.readouterr().err
    assert network_choices.choices(torch.device("cuda"))["autotuned"] == (False, "autotuned")


def test_scores_that_disagree_fail_on_any_device(tmp_path, monkeypatch):
    for part in ("extraction", "statistics", "rounds"):
        monkeypatch.setattr(gpu_lines, part, lambda *_: [])
    apart = gpu_lines.Measured("scores", 2e-6, gpu_lines.AGREEMENT, False)
    monkeypatch.setattr(gpu_lines, "agreement", lambda *_: [apart])
    assert gpu_lines.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1


def test_the_command_of_a_whole_run_runs(tmp_path, command):
    features = write_features(tmp_path / "features.npz")
    first, *arguments = children.whole_run(features, tmp_path / "out", "method=afl", "tasks=2")
    assert Path(first).is_file()
    assert command(*arguments)[0] == 0
    assert len(list((tmp_path / "out" / "runs").glob("afl-*/run.json"))) == 1


@pytest.mark.slow
def test_the_peak_is_the_childs_and_not_this_process_s():
    held = torch.ones(2**26)  # 256 MiB here, and nothing there
    small = children.peak_gib(children.python("pass"))
    large = children.peak_gib(children.python("x = bytearray(200 * 2**20); x[::4096] = bytes(len(x[::4096]))"))
    assert held.numel() == 2**26
    assert small < 0.1
    assert large - small == pytest.approx(200 / 1024, rel=0.1)


def test_a_command_that_fails_says_why():
    with pytest.raises(RuntimeError, match="exit code 1[\\s\\S]*ZeroDivisionError"):
        children.run(*children.python("1 / 0"))
