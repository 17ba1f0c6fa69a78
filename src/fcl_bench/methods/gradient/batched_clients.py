"""Which clients of a gradient method may train side by side, and how their models come out of one batched training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.linalg.tensors import all_finite
from fcl_bench.methods.gradient.batched_heads import ProximalTerm, Steps, Turn, train_heads
from fcl_bench.protocol.context import ClientData, State
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import SGD, client_optimiser, precision_of
from fcl_bench.training.linear_heads import LinearHeads, defined_last
from fcl_bench.training.network import Network
from fcl_bench.training.objective import Objective

if TYPE_CHECKING:
    from fcl_bench.methods.gradient.client import GradientClient


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
