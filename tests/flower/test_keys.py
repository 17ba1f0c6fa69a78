"""A federation with TLS and node keys, set up by the very commands of docs/how-to/federation.md.

A minute: pytest -m slow tests/flower/test_keys.py, where Flower is installed (pip install '.[flower]').
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flower.processes import PATIENCE, answers, commands, free_port, waited_for
from tests.small_runs import run_in

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("openssl", "ssh-keygen"))), reason="no openssl, or no ssh-keygen"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "federation.md"
SMALL = ("data=digits", "tasks=1")
#: Whether a node joins: one with a registered key, one with another, one without TLS.
NODES = {"known": True, "unknown": False, "plain": False}


def commands_of_the_page(port: int) -> dict[str, list[str]]:
    """The section's command lines by their first word, in order, with a port of the test's own."""
    section = PAGE.read_text().split("## TLS and keys")[1].split("\n## ")[0]
    found: dict[str, list[str]] = {}
    for line in re.findall(r"(?m)^    (\S.*)$", section):
        found.setdefault(line.split()[0], []).append(line.replace("localhost:8000", f"localhost:{port}"))
    return found


def ended(start, name: str, *command: str) -> int:
    process = start(name, *command)
    return process.wait(PATIENCE)


def test_the_pages_commands_make_a_federation_that_takes_known_nodes_only(tmp_path):
    port = free_port()
    page = commands_of_the_page(port)
    scripts = Path(sys.executable).parent
    path = {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}

    def shell(line: str) -> None:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"

    for line in (*page["openssl"], *page["ssh-keygen"]):
        shell(line)
    shell("ssh-keygen -q -t ecdsa -b 384 -N '' -f stranger")
    with commands(tmp_path, path) as start:
        [link] = page["flower-superlink"]
        needed = {"link": start("link", *link.split(), "--port", str(port))}
        waited_for(lambda: answers(port), tmp_path, needed)
        for line in (*page["mkdir"], *page["FLWR_HOME=flwr"]):
            shell(line)
        [node] = page["fcl-bench-node"]
        node_of = [sys.executable, "-m", "fcl_bench.flower.node", *node.split()[1:]]
        unknown = [part.replace("key=node0", "key=stranger") for part in node_of]
        start("unknown", *unknown, f"out={tmp_path / 'unknown'}")
        start("plain", *node_of[:3], f"link=localhost:{port}", "clients=0", f"out={tmp_path / 'plain'}")
        start("node", *node_of, f"out={tmp_path / 'known'}")
        [run] = page["fcl-bench"]
        reached = [*run.split()[1:], *SMALL, f"transport.link=localhost:{port}"]
        server = (sys.executable, "-m", "fcl_bench", *reached, f"out={tmp_path / 'there'}")
        without = [part for part in server if not part.startswith("transport.ca")]
        assert ended(start, "without", *without) == 2
        assert ended(start, "server", *server) == 0, (tmp_path / "server.log").read_text()[-2000:]
    assert "transport.link" in (tmp_path / "without.log").read_text()
    (model,) = tmp_path.glob("there/runs/*/model.safetensors")
    here = run_in(tmp_path / "here", "method=afl", "clients=1", *SMALL)
    assert model.read_bytes() == (here.folder / "model.safetensors").read_bytes()
    joined = {name: "SuperNode ID" in (tmp_path / name / "nodes/supernode-0.log").read_text() for name in NODES}
    assert joined == NODES
