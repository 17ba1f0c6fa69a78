"""The example's project on Flower itself: a SuperLink with two SuperNodes, and a simulation of a hundred clients on Ray.

A minute each: pytest -m slow tests/flower/test_app_job.py, where Flower is installed (pip install '.[flower]').
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flower.processes import PATIENCE, answers, commands, free_port, waited_for

pytest.importorskip("flwr", reason="Flower is not installed (pip install '.[flower]')")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install ray)")


def program(name):
    return str(Path(sys.executable).with_name(name))


def accuracies(text):
    """A_t in percent after each task, as the server logs it."""
    return [float(found) for found in re.findall(r"task \d of \d: ([\d.]+) %", text)]


def started_run(tmp_path, started, connection, *options):
    """Run a copy of the example, and return what its server logs."""
    if not (tmp_path / "project").exists():
        shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    name = f"run-{len(list(tmp_path.glob('run-*')))}"
    flwr = started(name, program("flwr"), "run", "project", connection, *options, "--stream")
    log = tmp_path / f"{name}.log"
    try:
        flwr.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.fail(log.read_text()[-3000:])
    return log.read_text()


def test_the_example_runs_on_a_superlink_with_two_supernodes(tmp_path):
    port = free_port()
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "link"\n[superlink.link]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    with commands(tmp_path) as started:
        options = ("--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
        needed = {"link": started("link", program("flower-superlink"), *options)}
        waited_for(lambda: answers(port), tmp_path, needed)
        for client in range(2):
            which = f"partition-id={client} num-partitions=2"
            nodes = (
                "--insecure",
                "--superlink",
                f"127.0.0.1:{port}",
                "--port",
                str(free_port()),
                "--node-config",
                which,
            )
            needed[f"node{client}"] = started(f"node{client}", program("flower-supernode"), *nodes)
        told = started_run(tmp_path, started, "link", "--run-config", "tasks=2")
    found = accuracies(told)
    assert len(found) == 2, told[-3000:]
    assert found[0] > 80
    assert found[1] > 60


@NEEDS_RAY
def test_the_example_runs_in_a_simulation_of_a_hundred_clients(tmp_path):
    ports = {f"FLWR_LOCAL_{kind}_PORT": str(free_port()) for kind in ("SUPERLINK_HTTP_API", "CONTROL_API")}
    with commands(tmp_path, ports) as started:
        many = ("--federation-config", "num-supernodes=100 client-resources-num-cpus=1")
        told = started_run(tmp_path, started, "local", *many)
    found = accuracies(told)
    assert len(found) == 5, told[-3000:]
    assert found[-1] > 85
