"""Three nodes of a real federation give the bits of one process, with methods of every kind.

Two minutes: pytest -m slow tests/flower/test_three_nodes.py, where Flower is installed (pip install '.[flower]').
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.flower.processes import PATIENCE, answers, commands, free_port, waited_for
from tests.small_methods import short_run
from tests.small_runs import run_in

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")
pytestmark = pytest.mark.slow

#: Closed form, one that merges in order, one with masks, trained, with clients' states, and with their memories.
METHODS = ("afl", "stsa_e", "fedran", "centred_sketch", "fedavg", "fedprotip", "fedicarl")
GIVEN = ("data=digits", "clients=3", "tasks=2", "beta=1")


def test_three_nodes_give_the_bits_of_one_process(tmp_path):
    port = free_port()
    link = (str(Path(sys.executable).with_name("flower-superlink")), "--insecure", "--port", str(port))
    with commands(tmp_path) as start:
        needed = {"link": start("link", *link, "--disable-runtime-dependency-installation")}
        waited_for(lambda: answers(port), tmp_path, needed)
        for client in range(3):
            node = (sys.executable, "-m", "fcl_bench.flower.node", f"link=127.0.0.1:{port}", f"clients={client}")
            needed[f"node{client}"] = start(f"node{client}", *node, "policy=none", f"out={tmp_path / f'node{client}'}")
        for method in METHODS:
            given = (*GIVEN, f"method={method}", *short_run(method))
            reached = ("transport=flower", f"transport.link=127.0.0.1:{port}", f"out={tmp_path / 'there'}")
            server = start(method, sys.executable, "-m", "fcl_bench", *given, *reached)
            assert server.wait(PATIENCE) == 0, (tmp_path / f"{method}.log").read_text()[-2000:]
            here = run_in(tmp_path / "here", *given)
            there = tmp_path / "there" / "runs" / here.folder.name
            assert (there / "model.safetensors").read_bytes() == (here.folder / "model.safetensors").read_bytes(), (
                method
            )
    forked = [(tmp_path / f"node{client}/nodes/supernode-{client}.log").read_text() for client in range(3)]
    assert not any("fcl-bench:" in told for told in forked), "a message's process was not forked"
