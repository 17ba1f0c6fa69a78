"""Steps of a client on its samples, and the average of clients' models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network


class Optimiser(Protocol):
    """What a trainer asks of an optimiser, as of torch's own."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def step(self) -> object: ...


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
        """Forget the gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """weight -= rate * gradient, or rate * v."""
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


def client_optimiser(network: Network, knobs: Training, rate: float) -> Optimiser:
    """The optimiser of one round, over the parameters that train; those of one prefix in `knobs.rates` are a group.

    Args:
        network: whose parameters.
        knobs: optimiser, rates, momentum, weight decay.
        rate: step size of the round for parameters without a rate of their own; the others follow its schedule.
    """
    training = network.training_parameters()
    made = [{"params": list(training.values()), "lr": rate}] if training else []
    if knobs.rates:
        made = _groups(training, knobs, rate)
    if knobs.optimizer == "adam":
        return torch.optim.Adam(made)
    if knobs.optimizer == "adamw":
        return torch.optim.AdamW(made, weight_decay=knobs.weight_decay)
    return SGD(made, knobs.momentum)


def _groups(training: Mapping[str, torch.nn.Parameter], knobs: Training, rate: float) -> list[dict[str, Any]]:
    """The parameters of each prefix in `knobs.rates`, and all others, with their rates."""
    groups: dict[str, list[torch.nn.Parameter]] = {prefix: [] for prefix in ["", *knobs.rates]}
    for name, parameter in training.items():
        groups[_longest_prefix(name, knobs)].append(parameter)
    return [
        {"params": parameters, "lr": own_rate(prefix, knobs, rate)}
        for prefix, parameters in groups.items()
        if parameters
    ]


def own_rate(name: str, knobs: Training, rate: float) -> float:
    """The step size of a parameter, or of those whose names begin with a prefix of `knobs.rates`.

    Args:
        name: its name, or the prefix.
        knobs: rates, and the first round's rate of all others.
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


def average(sums: Mapping[str, torch.Tensor], total: float) -> dict[str, torch.Tensor]:
    """The weighted mean in float32 of a sum of models that was kept in float64."""
    return {name: (value / total).float() for name, value in sums.items()}


def with_prefix(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
