"""A message's process is forked from one that has imported Flower; where that is impossible, Flower's own starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fcl_bench.flower import frames, handover, node, supernode
from fcl_bench.flower.forks import COMMAND, write_command

#: A process that forks; the work is to note who did it and the arguments, or to fail.
SERVER = """
import os, sys, time
from pathlib import Path
from fcl_bench.flower import forks
from fcl_bench.flower import frames

def work():
    if sys.argv[1] == "fail":
        raise RuntimeError("as asked")
    if sys.argv[1] == "stay":
        Path(sys.argv[2]).symlink_to(str(os.getpid()))
        time.sleep(600)
    folder = Path(sys.argv[1])
    (folder / "part").write_text(f"{os.getppid()} {sys.argv}")
    (folder / "part").rename(folder / "done")

forks.serve(frames.listener(Path(sys.argv[1])), work)
"""


@pytest.fixture
def place(tmp_path):
    """A folder with the program; Flower's own notes that it was started."""
    own = tmp_path / "own"
    own.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/own-done"\n')
    own.chmod(0o700)
    folder = tmp_path / "a folder"
    folder.mkdir()
    write_command(folder, tmp_path / "s", own)
    return tmp_path


@pytest.fixture
def server(place):
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(place / "s")], stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: (place / "s").exists())
        yield process
        process.kill()


def wait_for(what) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def asked(place: Path, *arguments: str) -> str:
    done = subprocess.run([place / "a folder" / COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    return done.stderr


def test_the_program_hands_its_arguments_over(place, server):
    assert not asked(place, "fail", "--token", "a b")
    arguments = [str(place), "--token", "a b'$(c)"]
    assert not asked(place, *arguments)
    wait_for(lambda: (place / "done").exists())
    assert (place / "done").read_text() == f"{server.pid} {[COMMAND, *arguments]}"
    assert not (place / "own-done").exists()
    server.kill()
    assert "RuntimeError: as asked" in server.communicate()[1]


def test_what_was_forked_ends_with_the_process_that_forks(place, server):
    assert not asked(place, "stay", str(place / "pid"))
    wait_for((place / "pid").is_symlink)
    pid = int((place / "pid").readlink().name)
    assert running(pid)
    server.kill()
    wait_for(lambda: not running(pid))


def test_where_nobody_forks_it_is_flowers_own_program(place):
    assert "nobody forks here" in asked(place, "--token", "t")
    assert (place / "own-done").read_text() == "--token t\n"


def test_a_process_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(handover, "_PATIENCE", 0.2)
    with frames.listener(tmp_path / "s"):
        assert not handover.taken(str(tmp_path / "s"), ["a"])
    assert "nobody forks here (timed out)" in capsys.readouterr().err


def test_who_has_gone_gets_no_process(place, server):
    """The program has lost patience and does the work itself; the work is not done twice."""
    with frames.connected(str(place / "s")) as line:
        os.kill(server.pid, signal.SIGSTOP)
        frames.send(line, {"arguments": [str(place)]})
    os.kill(server.pid, signal.SIGCONT)
    (place / "later").mkdir()
    assert not asked(place, str(place / "later"))
    wait_for(lambda: (place / "later" / "done").exists())
    assert not (place / "done").exists()


def test_a_process_that_may_be_given_up_is_not_started_for_ever(monkeypatch, caplog):
    monkeypatch.setattr(node, "_PATIENCE", (0.0, 0.0))
    started = []

    def start():
        started.append(subprocess.Popen(["false"], start_new_session=True))
        return started[-1]

    kept = node._Kept("helper", start, "without it")
    for _ in range(8):
        if kept.process is not None:
            kept.process.wait()
        kept.look()
    assert len(started) == 2
    assert "the helper ended (1) 2 times: without it" in caplog.text
    kept.end()


def test_what_a_process_has_started_ends_with_it(tmp_path):
    child = tmp_path / "child"
    command = [
        "sh",
        "-c",
        f"(trap '' TERM INT; sleep 600 & echo $! > {child}.part; mv {child}.part {child}; wait) & wait",
    ]
    kept = node._Kept("parent", lambda: subprocess.Popen(command, start_new_session=True))
    wait_for(child.exists)
    kept.end()
    wait_for(lambda: not running(int(child.read_text())))


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_waits_begin_short_and_grow_to_flowers_own(monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(supernode.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(supernode.time, "sleep", sleep)
    waits = supernode.Waits()
    for _ in range(60):
        waits.sleep(3)
    assert slept[0] == supernode.FIRST
    assert slept == sorted(slept)
    assert slept[-1] == 3
    # A message that comes in the first five seconds waits for a second at most.
    assert max(seconds for seconds, total in zip(slept, accumulated(slept), strict=True) if total <= 5) <= 1
    waits.sleep(0.5)
    waits.sleep(3)
    assert slept[-2:] == [supernode.FIRST] * 2
    assert waits.perf_counter is time.perf_counter


def accumulated(values: list[float]) -> list[float]:
    return [sum(values[: count + 1]) for count in range(len(values))]


def test_flowers_module_waits_where_this_expects_it(monkeypatch, capsys):
    module = pytest.importorskip("flwr.supernode.start_client_internal", reason="Flower is not installed")
    monkeypatch.setattr(module, "time", module.time)
    supernode.look_soon()
    assert isinstance(module.time, supernode.Waits)
    assert not capsys.readouterr().err
    monkeypatch.delattr(module, "time")
    supernode.look_soon()
    assert "has its waits elsewhere" in capsys.readouterr().err


def test_the_frame_that_is_written_by_hand_is_one(tmp_path, monkeypatch):
    here = frames.listener(tmp_path / "s")
    monkeypatch.setattr(handover, "_PATIENCE", 0.2)
    with here:
        handover.taken(str(tmp_path / "s"), ["ä", "b c"])
        line, _ = here.accept()
        with line:
            assert frames.receive(line) == ({"arguments": ["ä", "b c"]}, [])
