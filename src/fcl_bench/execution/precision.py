"""The precision of networks, for the record, and a hint if a CPU has a faster precision that was not asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from fcl_bench import environment
from fcl_bench.config import Settings
from fcl_bench.execution.run_json import Precision

log = logging.getLogger(__name__)

#: Parameters of the network times images that pass through it, from which on a run counts as long: ResNet-18 with 9,000
#: images, which is minutes on one core.
_LONG = 1e11
#: The cost of a training step relative to a pass through a frozen network: forward and backward.
_TRAINED = 3


def precisions(settings: Settings, device: torch.device, features: str | None) -> Precision:
    """What run.json says: which forward passes were made in which precision.

    Args:
        settings: of the run.
        device: where it ran.
        features: of the frozen network; None where there was none.
    """
    return {
        "method": _of_training(settings.method, device),
        "adapt": _of_training(settings.adapt, device) if settings.adapt.trains_network else None,
        "features": features,
    }


def _of_training(choice: Any, device: torch.device) -> str | None:
    training = getattr(choice, "training", None)
    return None if training is None else training.forward_precision(device.type)


def tell_of_training(
    choice: Any, key: str, device: torch.device, network: Callable[[], torch.nn.Module], n: int
) -> None:
    """Print a hint if a network is trained for long in float32 on a CPU that has bfloat16.

    Args:
        choice: the method or the first stage, with its `training`.
        key: where the user sets it, such as method.training.
        device: where it trains.
        network: makes it.
        n: training samples of all tasks that it trains on.
    """
    training = getattr(choice, "training", None)
    if training is None or training.forward_precision(device.type) != "float32" or not _would_gain(device):
        return
    passages = _TRAINED * n * training.rounds * training.epochs * training.fraction
    _hint(f"{key}.precision=bfloat16", network(), passages)


def tell_of_extraction(network: torch.nn.Module, precision: str, device: torch.device, n: int) -> None:
    """Print a hint if features of n images are extracted in float32 on a CPU that has bfloat16."""
    if precision == "float32" and _would_gain(device):
        _hint("backbone.precision=bfloat16", network, n)


def _would_gain(device: torch.device) -> bool:
    return device.type == "cpu" and environment.multiplies_bfloat16()


def _hint(override: str, network: torch.nn.Module, passages: float) -> None:
    if passages * sum(weight.numel() for weight in network.parameters()) >= _LONG:
        log.info(
            "this CPU multiplies bfloat16 in hardware (AMX), and float32 is slower (a third of the speed for ResNet-18"
            " in training): %s is another run, with numbers rounded otherwise",
            override,
        )
