"""Small convolutional networks of several clients that train at the same time, as groups of one network's channels.

As with linear heads (`side_by_side`), every client takes its own batches, shifts and mirrors in its own order. Clients
with more steps come first, so that those which still have a step are the first ones. A smaller batch is filled up with
rows that count nowhere. The networks agree with `Trainer.train` to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from fcl_bench.training.batched_heads import CLIPPED, Steps
from fcl_bench.training.grouped import Grouped, Stack, first, stacked
from fcl_bench.training.network import Network
from fcl_bench.training.samples import Samples
from fcl_bench.training.trainer import Trainer


@dataclass(frozen=True)
class Turn:
    """What one client trains on.

    Attributes:
        samples: its own images.
        seed: of their order and augmentation.
        pull: what is added to its gradient, as of `Objective.pull`.
    """

    samples: Samples
    seed: int
    pull: tuple[Mapping[str, torch.Tensor], float, float | None] | None = None

    def batches(self, trainer: Trainer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches (b, ...) of all epochs with their labels (b,), as of a client that trains alone."""
        own, knobs = torch.Generator().manual_seed(self.seed), trainer.training
        for _ in range(knobs.epochs):
            yield from self.samples.batches(knobs.batch_size, trainer.augment, own)


def train_networks(network: Network, turns: Sequence[Turn], steps: Steps, trainer: Trainer) -> list[Stack]:
    """What training changes of each client's network, in the order of `turns`. It may not be finite.

    Args:
        network: with the weights from which all clients start; they are not changed, but its mode is.
        turns: at least one client.
        steps: how they step; `still` says nothing here.
        trainer: whose batch size, augmentation and standardisation.
    """
    # Batch norm has no statistics of a single image; its running ones serve.
    found: dict[int, Stack] = {}
    for several in (True, False):
        group = [k for k, turn in enumerate(turns) if (len(turn.samples) > 1) is several]
        group.sort(key=lambda k: -len(turns[k].samples))
        if group:
            network.train(several)
            models = _trained(network, [turns[k] for k in group], steps, trainer)
            found |= dict(zip(group, models, strict=True))
    return [found[k] for k in range(len(turns))]


def _trained(network: Network, turns: Sequence[Turn], steps: Steps, trainer: Trainer) -> list[Stack]:
    """The same of clients with no fewer samples than those behind them, in the network's mode."""
    grouped, stack = Grouped(network), stacked(network, len(turns))
    names = list(network.training_parameters())
    descent = _Descent(stack, names, turns, steps)
    for inputs, labels, held in _joint_batches(turns, trainer):
        m = len(held)
        images = trainer.standardise(inputs.flatten(0, 1)).unflatten(0, held.shape)
        now = first(stack, m, len(turns))
        leaves = [now[name].detach().requires_grad_() for name in names]
        scores = grouped.scores(images, held, now | dict(zip(names, leaves, strict=True)))
        share = (held.to(scores) / held.sum(dim=1, keepdim=True)).unsqueeze(2)
        gradient = steps.gradient(scores.detach(), labels, images, share)
        descent.step(list(torch.autograd.grad(scores, leaves, gradient)), m)
    changed = network.changing()
    return [
        {name: stack[name].unflatten(0, (len(turns), -1))[k].view_as(value) for name, value in changed.items()}
        for k in range(len(turns))
    ]


def _joint_batches(
    turns: Sequence[Turn], trainer: Trainer
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs (m, b, ...), labels (m, b) and which rows are samples (m, b), of the first m clients, step by step."""
    sources = [turn.batches(trainer) for turn in turns]
    while batches := [batch for source in sources if (batch := next(source, None)) is not None]:
        sizes = torch.tensor([len(labels) for _, labels in batches])
        inputs, labels = (pad_sequence(list(parts), batch_first=True) for parts in zip(*batches, strict=True))
        if (sizes != sizes[0]).any():
            # Rows that fill up have the client's first label, since the loss takes no class that does not compete.
            held = torch.arange(labels.shape[1]) < sizes.unsqueeze(1)
            held = held.to(labels.device)
            labels = torch.where(held, labels, labels[:, :1])
        else:
            held = torch.ones_like(labels, dtype=torch.bool)
        yield inputs, labels, held


class _Descent:
    """SGD of several clients' networks, in place.

    Args:
        stack: of all clients.
        names: of the parameters that train.
        turns: whose pulls.
        steps: rate, decay, momentum, and the rows that rest.
    """

    def __init__(self, stack: Stack, names: list[str], turns: Sequence[Turn], steps: Steps) -> None:
        self._of, self._steps, self._names = len(turns), steps, names
        self._weights = {name: stack[name] for name in names}
        self._velocity: Stack = {}
        pulls = [turn.pull for turn in turns if turn.pull is not None]
        self._pull = None
        if pulls:
            centres = {name: torch.cat([centre[name] for centre, _, _ in pulls]) for name in names}
            strengths = stack[names[0]].new_tensor([strength for _, strength, _ in pulls])
            self._pull = (centres, strengths, pulls[0][2])

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor], m: int) -> None:
        """One step of the first m clients along their gradients, in the order of the names, which are changed."""
        knobs = self._steps.knobs
        now = list(first(self._weights, m, self._of).values())
        if knobs.weight_decay:
            torch._foreach_add_(gradients, now, alpha=knobs.weight_decay)
        self._pulled(gradients, now, m)
        if knobs.momentum:
            if not self._velocity:  # in the first step, which every client takes that takes any
                self._velocity = {name: torch.zeros_like(value) for name, value in self._weights.items()}
            velocities = list(first(self._velocity, m, self._of).values())
            torch._foreach_mul_(velocities, knobs.momentum)
            torch._foreach_add_(velocities, gradients)
            gradients = velocities
        torch._foreach_add_(now, gradients, alpha=-self._steps.rate)

    def _pulled(self, gradients: list[torch.Tensor], now: list[torch.Tensor], m: int) -> None:
        """Add the pull, let rows rest, and clip."""
        rows, max_norm = [gradient.unflatten(0, (m, -1)) for gradient in gradients], None
        if self._pull is not None:
            centres, strengths, max_norm = self._pull
            for own, weights, centre in zip(rows, now, first(centres, m, self._of).values(), strict=True):
                own.addcmul_((weights - centre).unflatten(0, (m, -1)), _column(strengths[:m], own))
        for head, resting in self._steps.objective.resting.items():
            for name, own in zip(self._names, rows, strict=True):
                if name.startswith(f"heads.{head}."):
                    own[:, resting] = 0
        if max_norm is not None:
            norms = torch.stack([own.flatten(1).norm(dim=1) for own in rows]).norm(dim=0)
            factors = (max_norm / (norms + CLIPPED)).clamp(max=1.0)
            for own in rows:
                own.mul_(_column(factors, own))


def _column(values: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """(m,) values in the shape (m, 1, ...) of a tensor (m, ...)."""
    return values.view(-1, *[1] * (beside.dim() - 1))
