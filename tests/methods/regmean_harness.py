"""What the tests of RegMean share."""

from __future__ import annotations

import numpy as np
import torch

from fcl_bench.methods.transformers.regmean import RegMean
from tests.methods.classical_harness import training

EXACT = {"wire": "float64"}


def regmean(**knobs) -> RegMean:
    own = {name: knobs.pop(name) for name in ("damping", "trains", "frozen_heads", "loss_classes") if name in knobs}
    return RegMean(training(**{"weight_decay": 0.0, **knobs}), **{"damping": 1.0, "loss_classes": "seen", **own})


def joint(values, weight: str) -> np.ndarray:
    """(o, i + 1) the weight and its bias."""
    W, b = values[weight].double(), values[weight.replace("weight", "bias")].double()
    return torch.cat([W, b[:, None]], dim=1).numpy()


def model_of_server(server) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in server.network.state().items()}
