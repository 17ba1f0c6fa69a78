"""A real federation on this machine: a SuperLink, two nodes, a server that is killed, and the bits of one process.

A minute: pytest -m slow tests/flower/test_job.py, where Flower is installed (pip install '.[flower]').
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.flower.processes import PATIENCE, answers, commands, free_port, waited_for
from tests.small_runs import run_in

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")
pytestmark = pytest.mark.slow

GIVEN = ("method=afl", "data=digits", "clients=3", "tasks=2", "beta=1")


@pytest.fixture
def started(tmp_path):
    with commands(tmp_path) as start:
        yield start


def test_a_federation_gives_the_bits_of_one_process_though_its_server_is_killed(tmp_path, started):
    port = free_port()
    link = str(Path(sys.executable).with_name("flower-superlink"))
    options = ("--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
    needed = {"link": started("link", link, *options, "--database", str(tmp_path / "link.db"))}
    waited_for(lambda: answers(port), tmp_path, needed)
    for clients in ("0", "1,2"):
        node = (sys.executable, "-m", "fcl_bench.flower.node", f"link=127.0.0.1:{port}")
        name = f"node{clients}"
        needed[name] = started(name, *node, f"clients={clients}", "policy=none", f"out={tmp_path / clients}")
    reached = ("transport=flower", f"transport.link=127.0.0.1:{port}", f"out={tmp_path / 'there'}")
    server = (sys.executable, "-m", "fcl_bench", *GIVEN, *reached)
    first = started("server", *server)
    needed["server"] = first
    waited_for(lambda: list(tmp_path.glob("there/runs/*/checkpoint/state.json")), tmp_path, needed)
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
