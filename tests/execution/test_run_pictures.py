"""Which pictures a run leaves."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from fcl_bench.execution.pictures import drawn
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import federation_of, image_tasks, tiny_context


@pytest.mark.parametrize("tasks", [2, 1])
def test_a_run_leaves_a_picture_of_its_accuracy(tasks):
    method = FedAvg(training=Training(rounds=1, epochs=1, augment="none"))
    data = image_tasks(np.random.default_rng(0), [2] * tasks, [[8, 8]] * tasks)
    federation = federation_of(method, tiny_context(), data)
    federation.run(lambda _: None)
    record = {
        **{"method": method.name, "data": "made", "backbone": "tiny", "tasks": tasks, "clients": 2, "seed": 0},
        **{"partition": "iid", "beta": None, "metrics": {"accuracy": [50.0] * tasks}},
    }
    files = drawn(record, federation)
    assert set(files) == {"accuracy.png"}
    for file in files.values():
        with Image.open(io.BytesIO(file)) as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 500


@pytest.mark.slow
def test_a_run_that_draws_nothing_imports_no_matplotlib():
    """One that was complete before only reports its record."""
    program = "import fcl_bench.execution.run, fcl_bench.execution.screen, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
