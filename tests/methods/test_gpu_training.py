"""Training on a GPU: the CPU's model to rounding, and its own bit for bit (run with: pytest -m gpu)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.small_runs import interrupted_in, run_in

pytestmark = pytest.mark.gpu

TINY = ("backbone=tiny", "backbone.width=8")
KNOBS = (
    *("tasks=3", "clients=3", "beta=1"),
    *("method.training.rounds=2", "method.training.epochs=1", "method.training.precision=float32"),
)


@pytest.fixture(autouse=True)
def _a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("method", ["fedavg", "fedprotip", "fot", "centralised"])
def test_a_gpu_agrees_with_the_cpu_and_with_itself(method, tmp_path, monkeypatch):
    columns = ("method.columns=16",) if method in ("fedprotip", "fot") else ()
    # FOT's public code counts what earlier bases hold of the inputs, which is another path through its kernels.
    columns += ("method.share_of=inputs",) if method == "fot" else ()
    choice = (f"method={method}", *columns, *TINY, *KNOBS)
    cpu = run_in(tmp_path / "cpu", *choice, "device=cpu")
    gpu = run_in(tmp_path / "gpu", *choice, "device=cuda")
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path / "again", *choice, "device=cuda")
    again = run_in(tmp_path / "again", *choice, "device=cuda")
    name = "model.safetensors"
    assert (gpu.folder / name).read_bytes() == (again.folder / name).read_bytes()
    accuracies = [np.array(outcome.record["metrics"]["accuracy"]) for outcome in (cpu, gpu)]
    # Training amplifies rounding; after six short rounds it has moved few predictions.
    np.testing.assert_allclose(*accuracies, atol=5)


@pytest.mark.parametrize("precision", ["float32", "auto"])
def test_a_transformer_trains_twice_alike_on_a_gpu(precision, tmp_path):
    """Fused attention adds gradients in any order."""
    choice = ("method=fedavg", *TINY, "backbone.architecture=vit", *KNOBS, f"method.training.precision={precision}")
    first, second = (run_in(tmp_path / name, *choice, "device=cuda").folder for name in ("first", "second"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
