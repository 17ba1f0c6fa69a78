"""What the tests of sweeps share."""

from __future__ import annotations

import pytest


@pytest.fixture
def plain_environment(monkeypatch):
    """No thread setting of the shell or of this test run."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "FCL_BENCH_GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
