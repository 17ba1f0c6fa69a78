"""Several steps of linear heads on one and the same batch: the logits are followed, the weights made at the end.

A client with no more samples than a batch takes all its steps on the same features Z (n, d). With the logits
S = Z W' + 1 b' and their gradient G_i at step i, a step of SGD with rate r and decay w on weights and biases is

    S <- (1 - r w) S - r (Z Z' + 1 1') G_i,

which takes n^2 L products instead of 2 n d L. After the last of k steps, with A = sum_i (1 - r w)^(k - i) G_i,

    W <- (1 - r w)^k W - r A' Z,    b <- (1 - r w)^k b - r A' 1.
"""

from __future__ import annotations

import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.training.knobs import Training
from fcl_bench.training.linear_heads import LinearHeads, defined_last
from fcl_bench.training.objective import Objective
from fcl_bench.training.optimisers import SGD


def repeats_one_batch(linear: LinearHeads, objective: Objective, samples: Samples, optimiser: object) -> bool:
    """Whether plain SGD on `samples` in batches without number would be these steps, for heads that all train."""
    return (
        linear.closed
        and type(samples) is Samples
        and isinstance(optimiser, SGD)
        and not optimiser.momentum
        and len(optimiser.param_groups) == 1
        and len(optimiser.param_groups[0]["params"]) == 2 * len(linear.heads)
        and defined_last(objective, "modify_gradients") is Objective
        and not objective.resting
    )


@torch.no_grad()
def train_repeatedly(
    linear: LinearHeads,
    objective: Objective,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    knobs: Training,
    rate: float,
) -> torch.Tensor:
    """Take `knobs.epochs` steps, and return the loss before the last of them.

    Args:
        linear: the heads, which are changed.
        objective: whose `score_gradient` gives G.
        inputs, labels: (n, d) and (n,) the batch.
        knobs: epochs and weight decay.
        rate: step size.
    """
    decayed = 1 - rate * knobs.weight_decay
    scores = last = linear.scores(inputs)
    # A tensor overflows to infinity, which is then reported as divergence; a number would be an error of Python's.
    decayed_in_all = scores.new_ones(())
    gram = torch.addmm(inputs.new_ones(1, 1), inputs, inputs.T)
    total = torch.zeros_like(scores)
    for _ in range(knobs.epochs):
        last = scores
        gradient = objective.score_gradient(scores, labels, inputs)
        total.mul_(decayed).add_(gradient)
        decayed_in_all = decayed_in_all * decayed
        scores = torch.addmm(scores, gram, gradient, beta=decayed, alpha=-rate)
    for head, own in linear.parts(total):
        head.weight.mul_(decayed_in_all).addmm_(own.T, inputs, alpha=-rate)
        head.bias.mul_(decayed_in_all).sub_(own.sum(dim=0), alpha=rate)
    return objective.score_loss(last, labels, inputs)
