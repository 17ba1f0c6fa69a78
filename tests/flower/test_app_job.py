"""The example's project on Flower itself: a SuperLink with two SuperNodes, and a simulation of 100 clients on Ray.

A minute each: pytest -m slow tests/flower/test_app_job.py, where Flower is installed (pip install '.[flower]').
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.flower.processes import PATIENCE, answers, commands, free_port, waited_for

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install ray)")


def program(name):
    return str(Path(sys.executable).with_name(name))


@contextmanager
def superlink(tmp_path, *options):
    """A SuperLink of the name `link`; what starts further commands, and its port."""
    shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    port = free_port()
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "link"\n[superlink.link]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    # Flower starts its programs by their names.
    first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with commands(tmp_path, {"PATH": first}) as started:
        common = ("--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
        needed = {"link": started("link", program("flower-superlink"), *common, *options)}
        waited_for(lambda: answers(port), tmp_path, needed)
        yield started, port


def accuracies(tmp_path, started, *options):
    """A_t in percent after each task of a run of the project, as its server logs them."""
    flwr, log = started("run", program("flwr"), "run", "project", "link", *options, "--stream"), tmp_path / "run.log"
    try:
        flwr.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.fail(log.read_text()[-3000:])
    found = [float(accuracy) for accuracy in re.findall(r"task \d of \d: ([\d.]+) %", log.read_text())]
    assert found, log.read_text()[-3000:]
    return found


def test_the_example_runs_on_a_superlink_with_two_supernodes(tmp_path):
    with superlink(tmp_path) as (started, port):
        for client in range(2):
            own = ("--port", str(free_port()), "--node-config", f"partition-id={client} num-partitions=2")
            started(
                f"node{client}", program("flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}", *own
            )
        found = accuracies(tmp_path, started, "--run-config", "tasks=2")
    assert len(found) == 2
    assert found[0] > 90
    assert found[1] > 85


@NEEDS_RAY
def test_the_example_runs_in_a_simulation_of_a_hundred_clients(tmp_path):
    with superlink(tmp_path, "--simulation", "--control-api-address", f"127.0.0.1:{free_port()}") as (started, _):
        many = "num-supernodes=100 client-resources-num-cpus=1"
        found = accuracies(tmp_path, started, "--federation-config", many, "--run-config", "tasks=2")
    assert len(found) == 2
    assert found[1] > 85
