"""All bytes between one site and the SuperLink, and nothing of the site in them.

Some minutes: pytest -m slow tests/flower/test_capture.py, where Flower is installed (pip install '.[flower]').
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.flower.processes import PATIENCE, answers, commands, free_port, waited_for
from tests.flower.proxy import Proxy
from tests.flower.search import found_arrays, found_words, unpacked

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")
pytestmark = pytest.mark.slow

METHODS = {
    "afl": (),
    "stsa_e": ("method.M=96", "method.dummy_clients=2"),
    "fedavg": ("method.trains=features", "method.training.rounds=1", "method.training.epochs=1"),
}
#: Names at the site that are on no other machine.
USER, FOLDER, FILE = "mallory-of-the-site", "folder-of-the-site", "patients-of-the-site.npz"
#: How many labels in a row are the site's list of labels.
_LABELS = 24


def save(path: Path, rng: np.random.Generator) -> None:
    """A file of a site: 160 samples of 4 classes in two tasks, in random order."""
    column = rng.permutation(np.repeat(np.arange(4), 40))
    x = (np.eye(4, 12)[column] * 3 + rng.normal(size=(160, 12))).astype(np.float32)
    np.savez(path, x=x, column=column, task=column // 2)


def test_no_name_path_label_list_or_row_crosses(tmp_path):
    rng, port = np.random.default_rng(0), free_port()
    site = tmp_path / FOLDER
    site.mkdir()
    for path in (tmp_path / "test.npz", tmp_path / "other.npz", site / FILE):
        save(path, rng)
    with np.load(site / FILE) as file:
        rows, column = file["x"], file["column"]
    labels = np.lib.stride_tricks.sliding_window_view(column, _LABELS)
    words = [USER, FOLDER, FILE, str(tmp_path), str(Path.cwd()), platform.node().ljust(5, ".")]
    node = (sys.executable, "-m", "fcl_bench.flower.node")
    with commands(tmp_path, {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}) as start:
        options = ("--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
        needed = {"link": start("link", "flower-superlink", *options)}
        waited_for(lambda: answers(port), tmp_path, needed)
        proxy = Proxy(port)
        own = ("clients=0", f"link=127.0.0.1:{proxy.port}", f"data.path={site / FILE}", f"out={site / 'out'}")
        named = ("env", f"USER={USER}", f"LOGNAME={USER}", f"HOME={site}", f"HOSTNAME={USER}")
        started = start("node0", *named, *node, *own)
        start("node1", *node, "clients=1", f"link=127.0.0.1:{port}", "data.path=other.npz", "out=out1")

        def run(*overrides: str) -> bytes:
            """What crossed in a run, which has to end well."""
            proxy.up.clear()
            proxy.down.clear()
            given = ("transport=flower", f"transport.link=127.0.0.1:{port}", "data=sites", "data.path=test.npz")
            server = start("server", sys.executable, "-m", "fcl_bench", *given, "clients=2", "tasks=2", *overrides)
            assert server.wait(PATIENCE) == 0, (tmp_path / "server.log").read_text()[-2000:]
            return unpacked(bytes(proxy.up) + b"\n" + bytes(proxy.down))

        for method, knobs in METHODS.items():
            crossed = run(f"method={method}", *knobs)
            # Something was captured: the site's answers, and what it was asked.
            there = ["query", "fcl_bench.methods", "clients"]
            assert found_words(crossed, there) == there, method
            assert found_words(crossed, words) == [], method
            assert found_arrays(crossed, rows) == [], method
            assert found_arrays(crossed, labels) == [], method
        # The search finds them where a site lets everything out.
        started.terminate()
        started.wait(60)
        start("open0", *named, *node, *own, "policy=none")
        crossed = run("method=centralised_ridge", "method.M=null", "transport.minimum=0.5")
        assert len(found_arrays(crossed, rows)) == len(rows)
