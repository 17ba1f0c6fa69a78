"""The knobs of federated training, `method.training` and `adapt.training`, and the optimisers that they name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fcl_bench import environment
from fcl_bench.config import knob
from fcl_bench.data.images.batches import AUGMENTATIONS
from fcl_bench.errors import UserError
from fcl_bench.protocol.compute import STEPS, TALLY
from fcl_bench.training.network import Network

#: `training.aggregate`: see `methods/gradient/robust.py`.
AGGREGATES = ("mean", "median", "trimmed_mean", "krum")
#: The most rounds, or epochs of a round. A larger number is a slip of the hand.
MOST_PASSES = 1_000_000


def diverged(key: str, lr: float, weight_decay: float) -> UserError:
    """What to tell when a model is no longer finite.

    A decay above 2 / lr makes weights grow in each step, whatever the loss is.
    """
    if weight_decay > max(lr, 2 / lr):
        remedy = f"a smaller {key}.weight_decay, below 2 / lr = {2 / lr:g}"
        return UserError(f"{key}.weight_decay={weight_decay:g}: training diverged", remedy)
    return UserError(f"{key}.lr={lr:g}: training diverged", f"a smaller {key}.lr")


@dataclass
class Training:
    """Knobs of federated training: see conf/method/_gradient.yaml."""

    rounds: int = knob(50, least=1, most=MOST_PASSES, words="an integer from 1 to 1000000")
    fraction: float = knob(1.0, above=0, most=1)
    epochs: int = knob(5, least=1, most=MOST_PASSES, words="an integer from 1 to 1000000")
    batch_size: int = knob(64, least=2)
    optimizer: str = knob("sgd", choices=("sgd", "adam", "adamw"))
    lr: float = knob(0.01, above=0)
    rates: dict[str, float] = knob(dict, above=0)
    momentum: float = knob(0.0, least=0, below=1, of="optimizer=sgd")
    weight_decay: float = knob(5e-4, least=0)
    schedule: str = knob("constant", choices=("constant", "cosine", "cosine_decay", "exponential", "step"))
    milestones: list[int] = knob(list, least=1, of="schedule=step")
    decay: float = knob(0.1, above=0, of="schedule=step,cosine_decay,exponential")
    weighting: str = knob("samples", choices=("samples", "uniform"))
    server_optimizer: str = knob("average", choices=("average", "momentum", "adam"))
    server_lr: float = knob(1.0, above=0, of="server_optimizer=momentum,adam")
    server_momentum: float = knob(0.9, least=0, below=1, of="server_optimizer=momentum,adam")
    aggregate: str = knob("mean", choices=AGGREGATES)
    trimmed: float = knob(0.1, least=0, below=0.5, of="aggregate=trimmed_mean")
    byzantine: int = knob(1, least=0, of="aggregate=krum")
    augment: str = knob("crop_flip", choices=AUGMENTATIONS)
    precision: str = knob("auto", choices=("auto", "float32", "bfloat16"))

    def check(self, key: str) -> None:
        """Raise a `UserError` for knobs that contradict each other; `key` is where the user set them."""
        if self.schedule == "step" and not self.milestones:
            raise UserError(f"{key}.schedule=step has no milestones", f"such as {key}.milestones=[50,75]")

    def forward_precision(self, device: str, images: bool) -> str:
        """float32, or bfloat16 under autocast, of forward passes of images or features on this type of device."""
        if self.precision == "auto":
            gains = device == "cuda" or (device == "cpu" and images and environment.multiplies_bfloat16())
            return "bfloat16" if gains else "float32"
        return self.precision

    def rate(self, round_: int) -> float:
        """The step size of a round of a task, of the rounds in which models travel."""
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * round_ / self.rounds)) / 2
        if self.schedule == "cosine_decay":
            return self.lr * (self.decay + (1 - self.decay) * (1 + math.cos(math.pi * round_ / self.rounds)) / 2)
        if self.schedule == "exponential":
            return self.lr * self.decay ** (round_ / self.rounds)
        if self.schedule == "step":
            return self.lr * self.decay ** sum(round_ >= milestone for milestone in self.milestones)
        return self.lr


def precision_of(choice: Any, device: torch.device) -> str | None:
    """The precision of the forward passes in which a method, or a first stage, trains; None: it trains no network."""
    training = getattr(choice, "training", None)
    return None if training is None else training.forward_precision(device.type, choice.trains_network)


def cpu_precision(device: torch.device, *choices: Any) -> dict[str, str]:
    """The part of an identity that `precision=auto` of these choices decides by the CPU; none where that is float32."""
    auto = [choice for choice in choices if getattr(getattr(choice, "training", None), "precision", "") == "auto"]
    there = device.type == "cpu" and "bfloat16" in (precision_of(choice, device) for choice in auto)
    return {"cpu_precision": "bfloat16"} if there else {}


@dataclass
class Gaussian:
    """`method.gaussian`, the knobs of `ccvr=gaussian`: see conf/method/_gradient.yaml."""

    covariance: str = knob("full", choices=("full", "diagonal"))
    least: int = knob(2, least=1)
    samples: int = knob(256, least=1)
    epochs: int = knob(5, least=1)
    lr: float = knob(0.01, above=0)
    batch_size: int = knob(64, least=1)


class SGD:
    """Torch's SGD, bit for bit. Its own bookkeeping takes longer than a small step, and its first use imports torch's
    compiler, which takes more than a second.

    Args:
        groups: `params` and `lr` of each.
        momentum: m in v <- m v + gradient, weight -= rate v; v is the gradient at first.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float = 0.0) -> None:
        self.param_groups = groups
        self.momentum = momentum
        self._velocity: dict[torch.Tensor, torch.Tensor] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """weight -= rate * gradient, or rate * v."""
        TALLY.counts[STEPS] += 1
        for group in self.param_groups:
            moving = [weight for weight in group["params"] if weight.grad is not None]
            if moving:
                gradients = [weight.grad for weight in moving]
                steps = self._velocities(moving) if self.momentum else gradients
                torch._foreach_add_(moving, steps, alpha=-group["lr"])

    def _velocities(self, moving: list[torch.Tensor]) -> list[torch.Tensor]:
        """v of these parameters, with the gradient at hand."""
        known = [weight for weight in moving if weight in self._velocity]
        if known:
            velocities = [self._velocity[weight] for weight in known]
            torch._foreach_mul_(velocities, self.momentum)
            torch._foreach_add_(velocities, [weight.grad for weight in known if weight.grad is not None])
        for weight in moving:
            if weight not in self._velocity:
                assert weight.grad is not None
                self._velocity[weight] = weight.grad.clone()
        return [self._velocity[weight] for weight in moving]


def client_optimiser(network: Network, knobs: Training, rate: float) -> SGD | torch.optim.Optimizer:
    """The optimiser of one round, over the parameters that train; those of one prefix in `knobs.rates` are a group.

    Args:
        rate: step size of the round for parameters without a rate of their own; the others follow its schedule.
    """
    groups: dict[str, list[torch.nn.Parameter]] = {prefix: [] for prefix in ["", *knobs.rates]}
    for name, parameter in network.training_parameters().items():
        groups[_longest_prefix(name, knobs)].append(parameter)
    made = [{"params": own, "lr": own_rate(prefix, knobs, rate)} for prefix, own in groups.items() if own]
    if knobs.optimizer == "adam":
        return torch.optim.Adam(made)
    if knobs.optimizer == "adamw":
        return torch.optim.AdamW(made, weight_decay=knobs.weight_decay)
    return SGD(made, knobs.momentum)


def own_rate(name: str, knobs: Training, rate: float) -> float:
    """The step size of a parameter, or of those whose names begin with a prefix of `knobs.rates`.

    Args:
        rate: of the round, for parameters without a rate of their own.
    """
    prefix = _longest_prefix(name, knobs)
    return rate * knobs.rates[prefix] / knobs.lr if prefix else rate


def _longest_prefix(name: str, knobs: Training) -> str:
    """The longest of the prefixes in `knobs.rates` with which a name begins; "" where there is none."""
    return max((prefix for prefix in knobs.rates if name.startswith(prefix)), key=len, default="")


@torch.no_grad()
def add_weight_decay(weights: list[torch.nn.Parameter], weight_decay: float) -> None:
    """gradient += weight_decay * weight, as torch's own SGD does it, but before a method sees the gradients."""
    if not weight_decay:
        return
    pairs = [(weight.grad, weight) for weight in weights if weight.grad is not None]
    if pairs:
        torch._foreach_add_([grad for grad, _ in pairs], [weight for _, weight in pairs], alpha=weight_decay)
