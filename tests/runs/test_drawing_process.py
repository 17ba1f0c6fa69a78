"""Pictures that a process beside the run draws, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fcl_bench.runs.pictures import drawing_process
from fcl_bench.runs.pictures.drawing_process import drawing_beside
from fcl_bench.runs.pictures.pictures import Pictures, drawn

MATRIX = np.where(np.tri(3, dtype=bool), 50.0, np.nan)
PICTURES = Pictures("a run", [80.0, None, 60.0], MATRIX, [2, 4, 6], drift=MATRIX / 100)


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """The processes that the test starts, also where Matplotlib is imported or there is one core."""
    monkeypatch.setattr(drawing_process, "_pays", lambda: True)
    processes, Popen = [], subprocess.Popen

    def popen(*arguments, **keywords):
        processes.append(Popen(*arguments, **keywords))
        return processes[-1]

    monkeypatch.setattr(drawing_process.subprocess, "Popen", popen)
    return processes


def test_the_files_are_those_drawn_in_this_process_whatever_lies_in_the_working_folder(started, tmp_path, monkeypatch):
    for name in ("random", "pickle", "numpy", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not that one')")
    monkeypatch.chdir(tmp_path)
    expected = drawn(PICTURES)
    monkeypatch.setattr(drawing_process, "drawn", None)  # not in this process
    with drawing_beside() as draw:
        assert draw(PICTURES) == expected
    assert set(expected) == {"accuracy.png", "drift.png"}
    assert len(started) == 1


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('no pickle')", "import os; os.kill(os.getpid(), 9)"])
def test_a_process_that_fails_is_replaced_by_this_one(started, monkeypatch, code):
    monkeypatch.setattr(drawing_process, "_CODE", code)
    with drawing_beside() as draw:
        if "kill" in code:
            started[0].wait()  # nobody reads what is sent to it
        assert draw(PICTURES) == drawn(PICTURES)


def test_what_is_wrong_with_the_pictures_is_raised_here(started, capfd):
    with drawing_beside() as draw, pytest.raises(ValueError, match="1- or 2-d"):
        draw(Pictures("a run", [80.0, 70.0], np.zeros((3, 2, 2, 2)), [1, 2]))
    assert "Traceback" in capfd.readouterr().err


def test_a_process_that_had_nothing_to_draw_ends_with_the_block(started):
    with pytest.raises(RuntimeError, match="the run failed"), drawing_beside():
        raise RuntimeError("the run failed")
    assert started[0].returncode is not None


def test_a_run_that_is_killed_leaves_no_process(tmp_path):
    program = (
        "import sys, time\n"
        "from fcl_bench.runs.pictures import drawing_process\n"
        "drawing_process._pays = lambda: True\n"
        "popen = drawing_process.subprocess.Popen\n"
        "def started(*a, **k):\n"
        "    process = popen(*a, **k); print(process.pid, flush=True); return process\n"
        "drawing_process.subprocess.Popen = started\n"
        "with drawing_process.drawing_beside(): time.sleep(600)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    drawing = int(run.stdout.readline())
    run.send_signal(signal.SIGKILL)
    run.communicate()
    for _ in range(600):
        if not alive(drawing):
            return
        time.sleep(0.1)
    os.kill(drawing, signal.SIGKILL)
    pytest.fail("the process was still there after a minute")


def alive(process: int) -> bool:
    """Whether it runs; one that ended and that nobody has asked for its exit code yet does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("cores", "imported"), [(1, False), (2, True)])
def test_no_process_is_started_where_it_would_save_nothing(monkeypatch, cores, imported):
    monkeypatch.setattr(drawing_process, "available_cores", lambda: cores)
    modules = {name: module for name, module in sys.modules.items() if name != "matplotlib"}
    if imported:
        modules["matplotlib"] = sys
    monkeypatch.setattr(drawing_process.sys, "modules", modules)
    monkeypatch.setattr(drawing_process.subprocess, "Popen", None)
    with drawing_beside() as draw:
        assert draw is drawn


def test_a_process_that_cannot_be_started_is_done_without(monkeypatch):
    def refused(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(drawing_process, "_pays", lambda: True)
    monkeypatch.setattr(drawing_process.subprocess, "Popen", refused)
    with drawing_beside() as draw:
        assert draw is drawn
