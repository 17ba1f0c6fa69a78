"""What a killed process leaves beside a file is gone after the same command, and a full disk is told in one line."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from fcl_bench.engine.checkpoint import Checkpoint
from tests.small_runs import run_in, settings_for

LEFT = "0" * 32
SMALL = ("method=afl", "tasks=2", "clients=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    run_in(out, *SMALL)
    return out


def hidden(folder) -> list[str]:
    return sorted(path.name for path in folder.glob(".*") if LEFT in path.name)


@pytest.mark.slow
def test_of_tables(runs, in_process):
    from fcl_bench.cli.tables import main

    options = ("--out", runs, "--metrics", "A_T", "--format", "csv")
    assert in_process(main, "fcl-tables", *options)[0] == 0
    tables = runs / "tables"
    (tables / f".summary-{LEFT}.csv").write_text("half")
    assert in_process(main, "fcl-tables", *options)[0] == 0
    assert hidden(tables) == []


@pytest.mark.slow
def test_of_a_preview(tmp_path, capsys):
    from fcl_bench.execution.preview import preview

    folder = preview(settings_for(tmp_path, *SMALL, "preview=true"))
    (folder / f".counts-{LEFT}.csv").write_text("half")
    (folder / f".split-{LEFT}.png").write_text("half")
    assert preview(settings_for(tmp_path, *SMALL, "preview=true")) == folder
    assert hidden(folder) == []


def test_of_a_checkpoint_that_stays(tmp_path):
    """That of an adapted network is kept with the cache."""
    folder = tmp_path / "adapted"
    folder.mkdir()
    (folder / f".tensors-1-{LEFT}.safetensors").write_text("half")
    (folder / f".state-{LEFT}.json").write_text("half")
    Checkpoint(folder, schema=1).save({"tasks_done": 1}, {"w": torch.zeros(2)})
    assert sorted(path.name for path in folder.iterdir()) == ["state.json", "tensors-1.safetensors"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.log")


def test_a_log_on_a_full_disk_is_one_line(command, tmp_path, monkeypatch):
    """logging printed a traceback of its own for every line of the log."""
    monkeypatch.setattr("fcl_bench.execution.run._RunLog.flush", full)
    code, _, err = command(*SMALL, f"out={tmp_path}")
    assert (code, err.count("\n")) == (2, 1)
    assert "writing failed, run.log: No space left on device (out=FOLDER and cache.dir=FOLDER" in err


def test_a_table_on_a_full_disk_is_one_line(runs, in_process, monkeypatch):
    from fcl_bench.cli.tables import main

    monkeypatch.setattr("fcl_bench.cli.tables.replacing", full)
    code, _, err = in_process(main, "fcl-tables", "--out", runs, "--metrics", "A_T", "--name", "other")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be written: No space left on device (another --out or --name)" in err
