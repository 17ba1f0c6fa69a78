"""Training of linear heads on features: gradients in closed form, without a graph through the linear layers.

With logits s = W z + b and g = dL/ds (b, L), the gradients are dL/dW = g' Z and dL/db = the sum of g's rows.

A client with no more samples than a batch takes all its steps on the same features Z (n, d). With the logits
S = Z W' + 1 b' and their gradient G_i at step i, a step of SGD with rate r and decay w on weights and biases is

    S <- (1 - r w) S - r (Z Z' + 1 1') G_i,

which takes n^2 L products instead of 2 n d L. After the last of k steps, with A = sum_i (1 - r w)^(k - i) G_i,

    W <- (1 - r w)^k W - r A' Z,    b <- (1 - r w)^k b - r A' 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.protocol import compute
from fcl_bench.training.knobs import SGD, Training
from fcl_bench.training.network import Network
from fcl_bench.training.objective import Objective

#: Multiplications of a product up to which a second thread gains nothing, and waiting for it may cost more than the
#: product: 64 x 512 x 100 takes 0.15 ms with one thread and 0.18 ms with two quiet ones.
_SMALL = 2**22


class LinearHeads:
    """The backward passes of a network whose body is the identity, under a loss on its logits.

    Args:
        network, objective: for which `fits` holds.

    Attributes:
        closed: whether the gradient in the logits has a closed form.
        loss: of the last batch; 0 before the first. A gradient in closed form does without it.
    """

    def __init__(self, network: Network, objective: Objective) -> None:
        self.loss: Callable[[], torch.Tensor] = partial(torch.zeros, ())
        self._network, self._objective = network, objective
        self.heads = [head for head in network.heads if isinstance(head, torch.nn.Linear)]
        # A class that changes the loss without a word about its gradient leaves the gradient to autograd.
        defined = defined_last(objective, "score_loss", "score_gradient")
        self.closed = "score_gradient" in vars(defined)
        sizes = [head.out_features for head in self.heads]
        #: The heads whose logits compete in the loss; the others' scores and gradients are 0, and not worth a product.
        self._competes = [not (by and defined is Objective) for by in objective.bystanders(sizes)]

    @staticmethod
    def fits(network: Network, objective: Objective) -> bool:
        """Whether nothing but linear heads trains, on inputs as they are, and the loss looks at logits alone."""
        return (
            type(network.body) is torch.nn.Identity
            and defined_last(objective, "loss") is Objective
            and defined_last(network, "forward", "logits") is Network
            and all(type(head) is torch.nn.Linear for head in network.heads)
            and all(name.startswith("heads.") for name, value in network.named_parameters() if value.requires_grad)
        )

    @contextmanager
    def few_threads(self, batch_size: int) -> Iterator[None]:
        """A block in which torch computes with one thread on the CPU, where batches of this size make small products.

        What counts are the sizes, so that the same command gives the same bits.
        """
        threads = torch.get_num_threads()
        logits = sum(head.out_features for head in self.heads)
        if threads == 1 or batch_size * self._network.dimension * logits > _SMALL:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    @torch.no_grad()
    def backward(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the gradient of the mean loss on features (b, d) with labels (b,) to the parameters that train."""
        compute.count(trained=len(inputs))
        scores = self._competing_scores(inputs)
        if self.closed:
            gradient = self._objective.score_gradient(scores, labels, inputs)
            self.loss = partial(self._objective.score_loss, scores, labels, inputs)
        else:
            gradient = self._differentiated(scores, labels, inputs)
        for (head, own), competes in zip(self.parts(gradient), self._competes, strict=True):
            if head.weight.requires_grad:
                _add_gradient(head.weight, own.T @ inputs if competes else torch.zeros_like(head.weight))
            if head.bias.requires_grad:
                _add_gradient(head.bias, own.sum(dim=0))

    def _competing_scores(self, inputs: torch.Tensor) -> torch.Tensor:
        """The logits (b, L) with 0 for heads of which none competes."""
        if all(self._competes):
            return self.scores(inputs)
        heads = zip(self.heads, self._competes, strict=True)
        found = [
            head(inputs) if competes else inputs.new_zeros(len(inputs), head.out_features) for head, competes in heads
        ]
        return torch.cat(found, dim=1)

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        """The logits (b, L) of features (b, d)."""
        return self._network.logits(inputs)

    def parts(self, gradient: torch.Tensor) -> Iterator[tuple[torch.nn.Linear, torch.Tensor]]:
        """Each head with its own columns of `gradient` (b, L)."""
        return zip(self.heads, gradient.split([head.out_features for head in self.heads], dim=1), strict=True)

    def _differentiated(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The gradient of `score_loss` in the logits, by autograd.

        If the loss looks at parameters besides, they have that part of their gradient from here.
        """
        with torch.enable_grad():
            scores = scores.detach().requires_grad_()
            loss = self._objective.score_loss(scores, labels, inputs)
        loss.backward()
        self.loss = loss.detach
        return torch.zeros_like(scores) if scores.grad is None else scores.grad


def _add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def defined_last(thing: object, *names: str) -> object:
    """Where one of these attributes was defined last: the object itself, or the most derived class that has one."""
    return next(place for place in (thing, *type(thing).__mro__) if any(name in vars(place) for name in names))


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
        and not objective.frozen_rows
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
        objective: whose `score_gradient` gives G.
        inputs, labels: (n, d) and (n,) the batch.
    """
    compute.count(steps=knobs.epochs, trained=knobs.epochs * len(inputs))
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
