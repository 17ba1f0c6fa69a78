"""What training imports on its way."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import numpy as np, torch
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import federation_of, image_tasks, tiny_context

for momentum in (0.0, 0.9):
    training = Training(rounds=1, epochs=1, batch_size=8, momentum=momentum)
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[8, 8], [8, 8]])
    federation_of(FedAvg(training=training, ccvr="gaussian"), tiny_context(), tasks).run(lambda _: None)
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_sgd_and_new_heads_do_without_torchs_compiler():
    """Its import takes longer than a small run."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False"], done.stderr
