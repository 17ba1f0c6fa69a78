"""What runs beside each other on a node: processes that are started again, and a SuperNode that looks soon."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fcl_bench.flower import node, supernode


def wait_for(what) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_process_that_ends_is_started_again(monkeypatch, caplog):
    monkeypatch.setattr(node, "_PAUSE", 0.0)
    started = []

    def start():
        started.append(subprocess.Popen(["false"], start_new_session=True))
        return started[-1]

    process = node._Restarted("worker", start)
    for _ in range(2):
        process.process.wait()
        process.look()
    process.end()
    assert len(started) == 3
    assert "the worker ended (1); it starts again" in caplog.text


def test_only_a_process_that_has_just_begun_is_waited_for(monkeypatch):
    """A node's SuperNode waited for two seconds where its worker had ended, and the other way round."""
    now, started = [100.0], []
    monkeypatch.setattr(node.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(node.time, "sleep", lambda seconds: pytest.fail("the other process is not looked at"))

    def start():
        started.append(subprocess.Popen(["false"], start_new_session=True))
        started[-1].wait()
        return started[-1]

    process = node._Restarted("worker", start)
    process.look()
    assert len(started) == 1
    now[0] += node._PAUSE
    process.look()
    process.look()
    assert len(started) == 2
    process.end()


#: A SuperNode of Flower that serves in a thread, and how its own loop ends.
SERVES = """
import sys, threading, time, types
inner = ("supernode", "supernode.cli", "supernode.start_client_internal", "supercore", "supercore.retry")
sys.modules |= {name: types.ModuleType(name) for name in ("flwr", *(f"flwr.{name}" for name in inner))}
sys.modules["flwr.supercore.retry"].http_retry = None
def loop():
    threading.Thread(target=time.sleep, args=(600,)).start()
    ENDS
sys.modules["flwr.supernode.cli"].flower_supernode = loop
sys.modules["flwr.supernode"].start_client_internal = sys.modules["flwr.supernode.start_client_internal"]
from fcl_bench.flower import supernode
supernode.main()
"""


@pytest.mark.parametrize(
    "ends",
    [
        "return",
        "raise ValueError('damaged')",
        "sys.exit(0)",
        "threading.Thread(target=lambda: 1 / 0).start(); time.sleep(600)",  # the heartbeat
    ],
)
def test_a_supernode_whose_loop_has_ended_ends(ends):
    """It stayed as a process that does nothing, and was never started again."""
    command = [sys.executable, "-c", SERVES.replace("ENDS", ends)]
    assert subprocess.run(command, timeout=60, capture_output=True).returncode == 1


def test_what_a_process_has_started_ends_with_it(tmp_path):
    child = tmp_path / "child"
    command = [
        "sh",
        "-c",
        f"(trap '' TERM INT; sleep 600 & echo $! > {child}.part; mv {child}.part {child}; wait) & wait",
    ]
    process = node._Restarted("parent", lambda: subprocess.Popen(command, start_new_session=True))
    wait_for(child.exists)
    process.end()
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
    retry = pytest.importorskip("flwr.supercore.retry.http_retry")
    monkeypatch.setattr(module, "time", module.time)
    monkeypatch.setattr(retry, "MAX_RETRY_DELAY", retry.MAX_RETRY_DELAY)
    supernode.look_soon()
    assert isinstance(module.time, supernode.Waits)
    assert max(itertools.islice(retry.make_simple_http_retry_invoker().wait_gen_factory(), 9)) == supernode.RETRY
    assert not capsys.readouterr().err
    monkeypatch.delattr(module, "time")
    supernode.look_soon()
    assert "has its waits elsewhere" in capsys.readouterr().err
