"""A student: a network of the model's form with new weights, which learns from synthetic images."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch

from fcl_bench.training.network import Network

#: The kind of the network; the student is of the same kind.
N = TypeVar("N", bound=Network)


def reinitialised(network: N) -> N:
    """A copy in training mode whose layers all have new weights, drawn as torch does by default."""
    student = copy.deepcopy(network)
    for module in student.modules():
        renew = getattr(module, "reset_parameters", None)
        # torch warns of a head without classes, which has nothing to renew.
        if callable(renew) and any(own.numel() for own in module.parameters(recurse=False)):
            renew()
    for name, value in student.named_parameters():
        # Parameters that never train are not learnt anew.
        value.requires_grad_(name not in student.never_trains)
        value.grad = None
    student.train()
    return student


def agreement(scores: torch.Tensor, wanted: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL_T(a || b) = T^2 KL(softmax(wanted / T) || softmax(scores / T)) of each sample, (b,)."""
    log_said, log_wanted = (scores / temperature).log_softmax(dim=1), (wanted / temperature).log_softmax(dim=1)
    return temperature**2 * (log_wanted.exp() * (log_wanted - log_said)).sum(dim=1)


def opposition(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """-mean 1(both name the same class) KL_1 of student and teacher (b, C): lowest if the student can't follow."""
    agree = (scores.argmax(dim=1) == wanted.argmax(dim=1)).to(scores.dtype)
    return -(agree * agreement(scores, wanted, 1.0)).mean()
