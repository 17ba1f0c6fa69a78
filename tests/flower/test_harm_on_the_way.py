"""A proxy before each node cuts, delays, halves and flips: nothing is absorbed that no node sent, and nothing hangs.

Some minutes: pytest -m slow tests/flower/test_harm_on_the_way.py, where Flower is installed (pip install '.[flower]').
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.flower.processes import answers, commands, free_port, waited_for
from tests.flower.proxy import Proxy
from tests.flower.recording import absorbed, never_sent
from tests.small_runs import run_in

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")
pytestmark = pytest.mark.slow

GIVEN = ("method=afl", "data=digits", "clients=3", "tasks=3", "beta=1")
REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 240


def test_what_is_harmed_on_the_way_is_sent_again_or_lost_in_one_line(tmp_path):
    port = free_port()
    given = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    given["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with commands(tmp_path, given) as start:
        options = ("--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
        needed = {"link": start("link", "flower-superlink", *options, "--database", "link.db")}
        waited_for(lambda: answers(port), tmp_path, needed)
        proxies = [Proxy(port, rate=0.03, seed=client) for client in range(3)]
        for client, proxy in enumerate(proxies):
            node = (f"link=127.0.0.1:{proxy.port}", f"clients={client}", "policy=none", f"out=node{client}")
            start(f"node{client}", sys.executable, "-m", "fcl_bench.flower.node", *node)
        saved, there = tmp_path / "absorbed", ("transport=flower", f"transport.link=127.0.0.1:{port}")
        recorded = (sys.executable, "-m", "tests.flower.recording", str(saved), *GIVEN, *there, "out=there")
        server = start("server", *recorded, f"transport.deadline={DEADLINE}")
        # Nothing hangs: the census and three rounds have their deadlines, and as much is for a machine that is busy.
        code = server.wait(8 * DEADLINE)
        last = (tmp_path / "server.log").read_text()
    assert never_sent(saved, tmp_path.glob("node*/nodes/ledger.jsonl")) == []
    assert sum(sum(proxy.done.values()) for proxy in proxies) >= 5
    if code == 0:
        here = run_in(tmp_path / "here", *GIVEN)
        (model,) = tmp_path.glob("there/runs/*/model.safetensors")
        assert model.read_bytes() == (here.folder / "model.safetensors").read_bytes()
        assert len(absorbed(saved)) == 9
    else:
        assert code == 2, last[-2000:]
        assert "Traceback" not in last
        assert last.splitlines()[-1].startswith("fcl-bench: error: client")
