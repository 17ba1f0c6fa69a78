"""Linear heads of several clients that train at the same time: one batched product instead of one product per client.

All clients start from the same heads. Each takes its own batches in its own order, so that its steps are those of a
client that trains alone. One step of m clients multiplies features (m, b, d) with weights (m, L, d). Clients with more
steps come first, so that those which still have a step are the first rows. A smaller batch is filled up with rows of
weight 0. Batched products round differently from single ones, so the heads agree with `Trainer.train` to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.nn.utils.rnn import pad_sequence

from fcl_bench.data.images.batches import epoch_batches
from fcl_bench.training.knobs import Training
from fcl_bench.training.objective import Objective

#: clip_grad_norm_ divides by the norm and this.
CLIPPED = 1e-6


@dataclass(frozen=True)
class ProximalTerm:
    """What one client adds to its gradient, after weight decay: strength (w - centre), then clipping of the whole.

    Attributes:
        weight, bias: (L, d) and (L,) the centre.
        strength: of the term.
        max_norm: of the whole gradient; None: no clipping.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    strength: float
    max_norm: float | None = None


@dataclass(frozen=True)
class Turn:
    """What one client trains on.

    Attributes:
        inputs: (n, d) features in float32.
        labels: (n,) int64.
        seed: of the order of the samples.
        proximal: None: nothing is added to the gradient.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    seed: int
    proximal: ProximalTerm | None = None

    def batches(self, knobs: Training) -> list[torch.Tensor]:
        """The samples (b,) of each step, in the order of a client that trains alone."""
        own = torch.Generator().manual_seed(self.seed)
        return [part for _ in range(knobs.epochs) for part in epoch_batches(len(self.labels), knobs.batch_size, own)]


@dataclass(frozen=True)
class Heads:
    """The weights of all heads as one matrix.

    Attributes:
        weight: (L, d), or (m, L, d) for m clients.
        bias: (L,), or (m, L).
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __add__(self, other: Heads) -> Heads:
        """The clients of both, one after the other."""
        return Heads(torch.cat([self.weight, other.weight]), torch.cat([self.bias, other.bias]))

    def __getitem__(self, clients: slice | torch.Tensor) -> Heads:
        return Heads(self.weight[clients], self.bias[clients])


@dataclass(frozen=True)
class Steps:
    """How all clients step.

    Attributes:
        objective: has `score_gradient` in closed form; it is the same function of the logits for all clients.
        knobs: epochs, batch size, momentum, weight decay.
        rate: step size of the round.
        still: (L,) bool, the logits whose weights and biases stay as they are; None: all train.
    """

    objective: Objective
    knobs: Training
    rate: float
    still: torch.Tensor | None = None

    def gradient(
        self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor, share: torch.Tensor
    ) -> torch.Tensor:
        """The gradient (m, b, L) of each client's mean loss in its logits.

        Args:
            scores: (m, b, L).
            labels: (m, b).
            inputs: (m, b, d).
            share: (m, b, 1), one over the number of samples in the client's batch; 0 for a row that fills up.
        """
        flat = self.objective.score_gradient(scores.flatten(0, 1), labels.flatten(), inputs.flatten(0, 1))
        return flat.view_as(scores).mul_(share * labels.numel())

    def repeats(self, turn: Turn) -> bool:
        """Whether a client takes all its steps on one and the same batch (see `linear_heads`)."""
        knobs = self.knobs
        one_batch = 0 < len(turn.labels) <= knobs.batch_size and knobs.epochs > 1
        return one_batch and not knobs.momentum and turn.proximal is None and self.still is None


@torch.no_grad()
def train_heads(start: Heads, turns: Sequence[Turn], steps: Steps) -> Heads:
    """The heads (m, ...) of each client after its round of SGD, in the order of `turns`. They may not be finite.

    Args:
        start: the heads with which all clients start; they are not changed.
        turns: at least one client.
        steps: how they step.
    """
    # Sorting is stable, so clients without a step come last.
    order = sorted(range(len(turns)), key=lambda k: (not steps.repeats(turns[k]), -len(turns[k].labels)))
    repeating = sum(steps.repeats(turn) for turn in turns)
    ordered = [turns[k] for k in order]
    found = [_stepwise(start, ordered[repeating:], steps)] if repeating < len(turns) else []
    if repeating:
        found.insert(0, _repeatedly(start, ordered[:repeating], steps))
    whole = found[0] if len(found) == 1 else found[0] + found[1]
    return whole[torch.tensor(order).argsort().to(whole.bias.device)]


class _Samples:
    """All clients' samples in one tensor, from which batches of several clients are cut at once."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._inputs = torch.cat([turn.inputs for turn in turns])
        self._labels = torch.cat([turn.labels for turn in turns])
        #: Where each client's samples begin.
        self.begins = [0, *accumulate(len(turn.labels) for turn in turns)]

    def batch(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features (m, b, d), labels (m, b) and shares (m, b, 1) of the samples `parts`, (b_k,) of each client."""
        places = pad_sequence(list(parts), batch_first=True, padding_value=-1)
        held = places >= 0
        share = (held / held.sum(dim=1, keepdim=True)).unsqueeze(2)
        # Rows that fill up are the first sample, since the loss takes no label of a class that does not compete.
        places = places.clamp_(min=0).to(self._labels.device)
        inputs = self._inputs.index_select(0, places.flatten()).view(*places.shape, -1)
        return inputs, self._labels[places], share.to(inputs.device)


def _stepwise(start: Heads, turns: Sequence[Turn], steps: Steps) -> Heads:
    """A step for every batch of every epoch; clients have no fewer samples than those behind them."""
    samples = _Samples(turns)
    plans = [
        [chosen + begin for chosen in turn.batches(steps.knobs)]
        for turn, begin in zip(turns, samples.begins, strict=False)
    ]
    heads = Heads(start.weight.repeat(len(turns), 1, 1), start.bias.repeat(len(turns), 1))
    descent = _Descent(heads, turns, steps)
    for step in range(len(plans[0])):
        batch, labels, share = samples.batch([plan[step] for plan in plans if step < len(plan)])
        now = heads[: len(labels)]
        scores = torch.baddbmm(now.bias.unsqueeze(1), batch, now.weight.transpose(1, 2))
        descent.step(steps.gradient(scores, labels, batch, share), batch)
    return heads


class _Descent:
    """SGD of several clients' heads, in place.

    Args:
        heads: (m, ...), of all clients.
        turns: whose proximal terms.
        steps: rate, decay, momentum, what stays still.
    """

    def __init__(self, heads: Heads, turns: Sequence[Turn], steps: Steps) -> None:
        self._heads, self._steps = heads, steps
        self._velocity: Heads | None = None
        terms = [turn.proximal for turn in turns if turn.proximal is not None]
        self._proximal = None
        if terms:
            column = heads.bias.new_tensor([term.strength for term in terms]).unsqueeze(1)
            centre = Heads(torch.stack([term.weight for term in terms]), torch.stack([term.bias for term in terms]))
            self._proximal = (centre, column, terms[0].max_norm)

    def step(self, gradient: torch.Tensor, batch: torch.Tensor) -> None:
        """One step of the first clients.

        Args:
            gradient: (m, b, L) in the logits.
            batch: (m, b, d).
        """
        steps, m = self._steps, len(gradient)
        now, rate, decay = self._heads[:m], steps.rate, steps.knobs.weight_decay
        if self._proximal is None and steps.still is None and not steps.knobs.momentum:
            now.weight.baddbmm_(gradient.transpose(1, 2), batch, beta=1 - rate * decay, alpha=-rate)
            now.bias.mul_(1 - rate * decay).sub_(gradient.sum(dim=1), alpha=rate)
            return
        weight, bias = torch.bmm(gradient.transpose(1, 2), batch), gradient.sum(dim=1)
        weight.add_(now.weight, alpha=decay)
        bias.add_(now.bias, alpha=decay)
        along = Heads(weight, bias)
        self._constrain(along, now, m)
        for values, held, velocity in zip(
            (along.weight, along.bias), (now.weight, now.bias), self._velocities(along), strict=True
        ):
            if velocity is not None:
                values = velocity[:m].mul_(steps.knobs.momentum).add_(values)
            held.sub_(values, alpha=rate)

    def _constrain(self, along: Heads, now: Heads, m: int) -> None:
        """Add the proximal term, let what is still stay, and clip."""
        still, max_norm = self._steps.still, None
        if self._proximal is not None:
            centre, strength, max_norm = self._proximal
            along.weight.addcmul_(now.weight - centre.weight[:m], strength[:m].unsqueeze(2))
            along.bias.addcmul_(now.bias - centre.bias[:m], strength[:m])
        if still is not None:
            along.weight.masked_fill_(still.unsqueeze(1), 0.0)
            along.bias.masked_fill_(still, 0.0)
        if max_norm is not None:
            norms = torch.stack([along.weight.flatten(1).norm(dim=1), along.bias.norm(dim=1)]).norm(dim=0)
            factors = (max_norm / (norms + CLIPPED)).clamp(max=1.0)
            along.weight.mul_(factors.view(-1, 1, 1))
            along.bias.mul_(factors.view(-1, 1))

    def _velocities(self, along: Heads) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """v of weights and biases of all clients, 0 at first; None without momentum."""
        if not self._steps.knobs.momentum:
            return None, None
        if self._velocity is None:  # in the first step, which every client takes that takes any
            self._velocity = Heads(torch.zeros_like(along.weight), torch.zeros_like(along.bias))
        return self._velocity.weight, self._velocity.bias


def _repeatedly(start: Heads, turns: Sequence[Turn], steps: Steps) -> Heads:
    """All steps of clients that have one batch: their logits are followed, as in `linear_heads`."""
    rate, epochs = steps.rate, steps.knobs.epochs
    decayed = 1 - rate * steps.knobs.weight_decay
    samples = _Samples(turns)
    inputs, labels, share = samples.batch([torch.arange(*ends) for ends in pairwise(samples.begins)])
    scores = torch.nn.functional.linear(inputs, start.weight, start.bias)
    gram = torch.baddbmm(inputs.new_ones(1, 1, 1), inputs, inputs.transpose(1, 2))
    total = torch.zeros_like(scores)
    for _ in range(epochs):
        gradient = steps.gradient(scores, labels, inputs, share)
        total.mul_(decayed).add_(gradient)
        scores = torch.baddbmm(scores, gram, gradient, beta=decayed, alpha=-rate)
    # A tensor overflows to infinity, which is then reported as divergence; a number would be an error of Python's.
    in_all = float(torch.tensor(decayed, dtype=torch.float64) ** epochs)
    weight = torch.baddbmm(start.weight.unsqueeze(0), total.transpose(1, 2), inputs, beta=in_all, alpha=-rate)
    return Heads(weight, start.bias * in_all - rate * total.sum(dim=1))
