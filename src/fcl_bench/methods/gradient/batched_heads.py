"""Linear heads of several clients that train at the same time: one batched product instead of one product per client.

All clients start from the same heads. Each takes its own batches in its own order, so that its steps are those of a
client that trains alone. One step of m clients multiplies features (m, b, d) with weights (m, L, d). Clients with more
steps come first, so that those which still have a step are the first rows. A smaller batch is filled up with rows of
weight 0. Batched products round differently from single ones, so the heads agree with `Trainer.train` to rounding.

Weights and biases are one matrix (L, d + 1): the bias is the weight of a last input, which is always 1. Behind it stand
zeros, up to a multiple of 16 columns: with 513 columns in place of 528 a product takes twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from fcl_bench.data.images.batches import Samples, epoch_batches
from fcl_bench.linalg.tensors import all_finite
from fcl_bench.protocol import compute
from fcl_bench.protocol.context import ClientData, State
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import SGD, Training, client_optimiser, precision_of
from fcl_bench.training.linear_heads import LinearHeads, defined_last
from fcl_bench.training.network import Network
from fcl_bench.training.objective import Objective

if TYPE_CHECKING:
    from fcl_bench.methods.gradient.client import GradientClient

#: clip_grad_norm_ divides by the norm and this.
CLIPPED = 1e-6
#: The number of columns is a multiple of this.
_COLUMNS = 16


@dataclass(frozen=True)
class ProximalTerm:
    """What one client adds to its gradient, after weight decay: strength (w - centre), then clipping of the whole.

    Attributes:
        centre: (L, d + 1).
        strength: of the term.
        max_norm: of the whole gradient; None: no clipping.
    """

    centre: torch.Tensor
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
class Steps:
    """How all clients step.

    Attributes:
        objective: has `score_gradient` in closed form; it is the same function of the logits for all clients.
        knobs: epochs, batch size, momentum, weight decay.
        rate: step size of the round.
        frozen_rows: (L,) bool, the logits whose weights and biases stay as they are; None: all train.
    """

    objective: Objective
    knobs: Training
    rate: float
    frozen_rows: torch.Tensor | None = None

    def gradient(
        self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor, share: torch.Tensor
    ) -> torch.Tensor:
        """The gradient (m, b, L) of each client's mean loss in its logits.

        Args:
            scores: (m, b, L).
            inputs: (m, b, ...).
            share: (m, b, 1), one over the number of samples in the client's batch; 0 for a row that fills up.
        """
        flat = self.objective.score_gradient(scores.flatten(0, 1), labels.flatten(), inputs.flatten(0, 1))
        return flat.view_as(scores).mul_(share * labels.numel())

    def repeats(self, turn: Turn) -> bool:
        """Whether a client takes all its steps on one and the same batch (see `linear_heads`)."""
        knobs = self.knobs
        one_batch = 0 < len(turn.labels) <= knobs.batch_size and knobs.epochs > 1
        return one_batch and not knobs.momentum and turn.proximal is None and self.frozen_rows is None


@torch.no_grad()
def train_heads(start: torch.Tensor, turns: Sequence[Turn], steps: Steps) -> torch.Tensor:
    """The heads (m, L, d + 1) of each client after its round of SGD, in the order of `turns`. They may not be finite.

    Args:
        start: (L, d + 1) the heads with which all clients start; they are not changed.
        turns: at least one client.
        steps: how they step.
    """
    width, start = start.shape[1], _padded(start)
    heads = start.repeat(len(turns), 1, 1)
    repeating = [k for k, turn in enumerate(turns) if steps.repeats(turn)]
    others = sorted(set(range(len(turns))) - set(repeating), key=lambda k: -len(turns[k].labels))
    for chosen, train in ((repeating, _repeatedly), (others, _stepwise)):
        if chosen:
            heads[chosen] = train(start, [turns[k] for k in chosen], steps)
    return heads[..., :width]


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Rows with as many columns as products are fast with."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % _COLUMNS))


class _Samples:
    """All clients' samples in one tensor, from which batches of several clients are cut at once."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        features = torch.cat([turn.inputs for turn in turns])
        self._inputs = _padded(torch.nn.functional.pad(features, (0, 1), value=1.0))
        self._labels = torch.cat([turn.labels for turn in turns])
        #: Where each client's samples begin.
        self.begins = [0, *accumulate(len(turn.labels) for turn in turns)]

    def batch(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs (m, b, ...), labels (m, b) and shares (m, b, 1) of the samples `parts`, (b_k,) of each client."""
        places = pad_sequence(list(parts), batch_first=True, padding_value=-1)
        held = places >= 0
        share = (held / held.sum(dim=1, keepdim=True)).unsqueeze(2)
        # Rows that fill up are the first sample, since the loss takes no label of a class that does not compete.
        places = places.clamp_(min=0).to(self._labels.device)
        inputs = self._inputs.index_select(0, places.flatten()).view(*places.shape, -1)
        return inputs, self._labels[places], share.to(inputs.device)


def _stepwise(start: torch.Tensor, turns: Sequence[Turn], steps: Steps) -> torch.Tensor:
    """A step for every batch of every epoch; clients have no fewer samples than those behind them."""
    samples, knobs, rate = _Samples(turns), steps.knobs, steps.rate
    plans = [
        [chosen + begin for chosen in turn.batches(knobs)] for turn, begin in zip(turns, samples.begins, strict=False)
    ]
    compute.count(steps=sum(map(len, plans)), trained=knobs.epochs * samples.begins[-1])
    heads = start.repeat(len(turns), 1, 1)
    velocity = torch.zeros_like(heads)
    terms = [turn.proximal for turn in turns if turn.proximal is not None]
    centres = torch.stack([_padded(term.centre) for term in terms]) if terms else heads
    strengths = heads.new_tensor([term.strength for term in terms]).view(-1, 1, 1)
    max_norm = terms[0].max_norm if terms else None
    for step in range(len(plans[0])):
        batch, labels, share = samples.batch([plan[step] for plan in plans if step < len(plan)])
        m = len(labels)
        now = heads[:m]
        gradient = steps.gradient(batch @ now.transpose(1, 2), labels, batch, share).transpose(1, 2)
        if not terms and steps.frozen_rows is None and not knobs.momentum:
            now.baddbmm_(gradient, batch, beta=1 - rate * knobs.weight_decay, alpha=-rate)
            continue
        along = torch.baddbmm(now, gradient, batch, beta=knobs.weight_decay)
        if terms:
            along.addcmul_(now - centres[:m], strengths[:m])
        if steps.frozen_rows is not None:
            along.masked_fill_(steps.frozen_rows.unsqueeze(1), 0.0)
        if max_norm is not None:
            along.mul_((max_norm / (along.norm(dim=(1, 2), keepdim=True) + CLIPPED)).clamp(max=1.0))
        if knobs.momentum:
            along = velocity[:m].mul_(knobs.momentum).add_(along)
        now.sub_(along, alpha=rate)
    return heads


def _repeatedly(start: torch.Tensor, turns: Sequence[Turn], steps: Steps) -> torch.Tensor:
    """All steps of clients that have one batch: their logits are followed, as in `linear_heads`."""
    rate, epochs = steps.rate, steps.knobs.epochs
    decayed = 1 - rate * steps.knobs.weight_decay
    samples = _Samples(turns)
    compute.count(steps=epochs * len(turns), trained=epochs * samples.begins[-1])
    inputs, labels, share = samples.batch([torch.arange(*ends) for ends in pairwise(samples.begins)])
    scores, gram = inputs @ start.T, inputs @ inputs.transpose(1, 2)
    total = torch.zeros_like(scores)
    for _ in range(epochs):
        gradient = steps.gradient(scores, labels, inputs, share)
        total.mul_(decayed).add_(gradient)
        scores = torch.baddbmm(scores, gram, gradient, beta=decayed, alpha=-rate)
    # A tensor overflows to infinity, which is then reported as divergence; a number would be an error of Python's.
    in_all = float(torch.tensor(decayed, dtype=torch.float64) ** epochs)
    return torch.baddbmm(start.unsqueeze(0), total.transpose(1, 2), inputs, beta=in_all, alpha=-rate)


def train_batched_clients(
    client: GradientClient, shards: Sequence[ClientData], broadcast: Message, states: Sequence[State]
) -> dict[int, torch.Tensor] | str:
    """The trained heads (L, d + 1) of these clients by their numbers, or why they can't train side by side.

    The network ends as the broadcast says, without any client's training.

    Args:
        client, shards, broadcast, states: as of `GradientClient.train_batched`, in a stage in which models travel.

    Raises:
        UserError: a model is not finite.
    """
    if precision_of(client.method, client.context.device) == "bfloat16":
        return "precision is bfloat16"
    client.take_over(shards[0], broadcast)
    network, knobs = client.network, client.method.training
    # On features, too, there may be layers before the heads that train (MOON's projection).
    if type(network.body) is not torch.nn.Identity:
        return "more than linear heads trains"
    turns: list[Turn] = []
    for client_data, state in zip(shards, states, strict=True):
        samples = client.samples(client_data, broadcast, state)
        objective = client.objective(client_data, broadcast, state)
        if reason := refused(network, samples, objective):
            return reason
        inputs, seed = client.trainer.standardise(samples.inputs), client.batch_seed(client_data, broadcast)
        turns.append(Turn(inputs, samples.labels, seed, _proximal(objective, network)))
    optimiser = client_optimiser(network, knobs, float(broadcast["rate"]))
    if not isinstance(optimiser, SGD) or len(optimiser.param_groups) != 1:
        return f"the step of {client.method.training_key} is not SGD with one rate"
    # A rate of their own that all parameters share counts too. Any client's objective does: they score alike.
    steps = Steps(objective, knobs, optimiser.param_groups[0]["lr"], _frozen_rows(network, objective))
    with client.trainer.reproducible(turns[0].seed):
        heads = train_heads(_joined(*network.classifier()), turns, steps)
    if not all_finite(heads):
        raise client.trainer.diverged()
    return {client_data.client: own for client_data, own in zip(shards, heads, strict=True)}


def refused(network: Network, samples: Samples, objective: Objective) -> str:
    """Why a client can't train beside others; "" where it can."""
    if type(samples) is not Samples:
        return "clients train on more than their own samples"
    if not LinearHeads.fits(network, objective):
        return "the loss looks at more than the logits of linear heads"
    if any(head.weight.requires_grad != head.bias.requires_grad for head in LinearHeads(network, objective).heads):
        return "a head trains in part"
    if defined_last(objective, "score_loss", "score_gradient") is not Objective:
        return "the gradient of the loss in the logits has no closed form"
    last = defined_last(objective, "modify_gradients", "proximal_term")
    if "proximal_term" not in vars(last) or defined_last(objective, "finish") is not Objective:
        return "the method changes gradients in a way of its own"
    return ""


def _joined(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """(L, d + 1) of weights (L, d) and biases (L,)."""
    return torch.cat([weight, bias.unsqueeze(1)], dim=1)


def _proximal(objective: Objective, network: Network) -> ProximalTerm | None:
    """What `modify_gradients` adds to the gradient, with the start's values for heads that don't train."""
    found = objective.proximal_term()
    if found is None:
        return None
    centre, strength, max_norm = found
    values = {**network.state(), **centre}
    count = range(len(network.heads))
    weight, bias = (torch.cat([values[f"heads.{head}.{kind}"] for head in count]) for kind in ("weight", "bias"))
    return ProximalTerm(_joined(weight, bias), strength, max_norm)


def _frozen_rows(network: Network, objective: Objective) -> torch.Tensor | None:
    """(L,) bool, the logits of heads that don't train, and of frozen rows; None if there are none."""
    found: list[torch.Tensor] = []
    for number, head in enumerate(LinearHeads(network, objective).heads):
        rows = torch.full((head.out_features,), not head.weight.requires_grad, device=network.device)
        rows[objective.frozen_rows.get(f"heads.{number}.weight", [])] = True
        found.append(rows)
    frozen = torch.cat(found)
    return frozen if bool(frozen.any()) else None
