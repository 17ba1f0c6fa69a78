"""Three nodes of a real federation give the bits of one process, with methods of every kind.

Two minutes: pytest -m slow tests/flower/test_three_nodes.py, where Flower is installed (pip install '.[flower]').
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.flower.processes import PATIENCE, answers, commands, free_port, waited_for
from tests.small_methods import short_run
from tests.small_runs import run_in

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")
pytestmark = pytest.mark.slow

#: Closed form, one that merges in order, one with masks, trained, with clients' states, and with their memories.
METHODS = ("afl", "stsa_e", "fedran", "centred_sketch", "fedavg", "fedprotip", "fedicarl")
GIVEN = ("data=digits", "clients=3", "tasks=2", "beta=1")


@contextmanager
def nodes(folder: Path) -> Iterator[Callable[..., None]]:
    """Three nodes of a real federation; does runs with it, which write below `there`."""
    port = free_port()
    link = (str(Path(sys.executable).with_name("flower-superlink")), "--insecure", "--port", str(port))
    with commands(folder) as start:
        needed = {"link": start("link", *link, "--disable-runtime-dependency-installation")}
        waited_for(lambda: answers(port), folder, needed)
        for client in range(3):
            node = (sys.executable, "-m", "fcl_bench.flower.node", f"link=127.0.0.1:{port}", f"clients={client}")
            needed[f"node{client}"] = start(f"node{client}", *node, "policy=none", f"out={folder / f'node{client}'}")

        def run(*given: str) -> None:
            reached = ("transport=flower", f"transport.link=127.0.0.1:{port}", f"out={folder / 'there'}")
            server = start("server", sys.executable, "-m", "fcl_bench", *reached, *given)
            assert server.wait(PATIENCE) == 0, (folder / "server.log").read_text()[-2000:]

        yield run


def test_three_nodes_give_the_bits_of_one_process(tmp_path):
    with nodes(tmp_path) as run:
        for method in METHODS:
            given = (*GIVEN, f"method={method}", *short_run(method))
            run(*given)
            here = run_in(tmp_path / "here", *given)
            there = tmp_path / "there" / "runs" / here.folder.name
            assert (there / "model.safetensors").read_bytes() == (here.folder / "model.safetensors").read_bytes(), (
                method
            )
    forked = [(tmp_path / f"node{client}/nodes/supernode-{client}.log").read_text() for client in range(3)]
    assert not any("fcl-bench:" in told for told in forked), "a message's process was not forked"


def test_open_rounds_of_three_nodes_end_like_synchronous_ones_of_one_process(tmp_path):
    given = (*GIVEN, "method=fedncm", "wire.dtype=float64")
    with nodes(tmp_path) as run:
        run(*given, "transport.rounds=open")
    here = run_in(tmp_path / "here", *given)
    (there,) = (tmp_path / "there" / "runs").glob("[!.]*")
    W, wanted = (load_file(folder / "model.safetensors")["W"] for folder in (there, here.folder))
    assert np.abs(W - wanted).max() < 1e-9
    rows = (there / "arrivals.csv").read_text().splitlines()[1:]
    found = sorted(row.split(",")[1:4] for row in rows)
    assert found == [[str(client), str(task), "absorbed"] for client in range(3) for task in range(2)]
