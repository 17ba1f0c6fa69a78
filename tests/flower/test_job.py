"""A real federation on this machine: a SuperLink, two nodes, a server that is killed, and the bits of one process.

A minute: pytest -m long tests/flower/test_job.py, where Flower is installed (pip install '.[flower]').
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.small_runs import run_in

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")
pytestmark = pytest.mark.long

GIVEN = ("method=afl", "data=digits", "clients=3", "tasks=2", "beta=1")
#: Seconds for whatever a loaded machine takes.
PATIENCE = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def waited_for(what, least: float = 0.2) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until
        time.sleep(least)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def started(tmp_path):
    """Starts commands of this environment, and ends them when the test ends."""
    processes = []
    # As many threads as this process has: both ends are to round alike.
    import torch

    own = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "FLWR_HOME": str(tmp_path / "flwr")}
    own |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}

    def start(name: str, *command: str) -> subprocess.Popen:
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log, cwd=tmp_path)
        processes.append(process)
        return process

    yield start
    for process in reversed(processes):
        process.terminate()
    for process in processes:
        process.wait(30)


def test_a_federation_gives_the_bits_of_one_process_though_its_server_is_killed(tmp_path, started):
    port = free_port()
    link = str(Path(sys.executable).with_name("flower-superlink"))
    options = ("--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
    started("link", link, *options, "--database", str(tmp_path / "link.db"))
    waited_for(lambda: answers(port))
    for clients in ("0", "1,2"):
        node = (sys.executable, "-m", "fcl_bench.cli.node", f"link=127.0.0.1:{port}")
        started(f"node{clients}", *node, f"clients={clients}", f"out={tmp_path / clients}")
    reached = ("transport=flower", f"transport.link=127.0.0.1:{port}", f"out={tmp_path / 'there'}")
    server = (sys.executable, "-m", "fcl_bench", *GIVEN, *reached)
    first = started("server", *server)
    waited_for(lambda: list(tmp_path.glob("there/runs/*/checkpoint/state.json")) or first.poll() is not None)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not list(tmp_path.glob("there/runs/*/run.json"))
    again = started("again", *server)
    again.wait(PATIENCE)
    assert again.returncode == 0, (tmp_path / "again.log").read_text()[-2000:]
    assert "going on after task 1 of 2" in (tmp_path / "again.log").read_text()
    (model,) = tmp_path.glob("there/runs/*/model.safetensors")
    here = run_in(tmp_path / "here", *GIVEN)
    assert model.read_bytes() == (here.folder / "model.safetensors").read_bytes()
    assert model.parent.name == here.folder.name
