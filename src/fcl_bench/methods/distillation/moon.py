"""MOON: model-contrastive learning (Li, He, Song, CVPR 2021).

A client pulls its representation r of a sample towards the broadcast model's, r_g, and pushes it away from that of its
own last model, r_j. With s(a, b) = cos(a, b) / tau it minimises CE + mu l_con, a mean over the batch, where

    l_con = -log( e^{s(r, r_g)} / (e^{s(r, r_g)} + e^{s(r, r_j)}) ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from fcl_bench.backbones.backbone import Trainable
from fcl_bench.config import knob
from fcl_bench.linalg.tensors import with_prefix
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.network import Heads, Network, linear_to_fill
from fcl_bench.training.objective import Objective

#: Prefix of the names of a client's last model in its state.
_MODEL = "model."


class FeatureContrast(Objective):
    """Cross-entropy and the contrast of features, which are the body's output (with a projection at its end or not).

    Args:
        known: the broadcast model.
        earlier: the client's last one, which may have fewer heads.
    """

    def __init__(self, heads: Heads, method: MOON, known: Network, earlier: Network) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self._method, self._known, self._earlier = method, known, earlier

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = network.body(inputs)
        with torch.no_grad():
            known, earlier = self._known.body(inputs), self._earlier.body(inputs)
        loss = self.score_loss(network.logits(features), labels, inputs)
        return loss + self._method.mu * contrast(features, known, earlier, self._method.tau)


def contrast(own: torch.Tensor, known: torch.Tensor, earlier: torch.Tensor, tau: float) -> torch.Tensor:
    """l_con = log(1 + e^{s(r, r_j) - s(r, r_g)}), the mean over a batch.

    Args:
        own: (b, p) r.
        known: (b, p) r_g, to which it is drawn.
        earlier: (b, p) r_j, from which it is pushed away.
        tau: temperature.
    """
    # At least float32, whatever the precision of the forward pass.
    own, known, earlier = (
        torch.nn.functional.normalize(r.to(torch.promote_types(r.dtype, torch.float32))) for r in (own, known, earlier)
    )
    return torch.nn.functional.softplus((own * (earlier - known)).sum(dim=1) / tau).mean()


class MOONClient(GradientClient):
    """Keeps the model that it last trained."""

    method: MOON

    def contrasts(self) -> bool:
        """Whether training moves the representation. If not, the term has no gradient and is left out."""
        if not self.method.mu:
            return False
        if any(name.startswith("body.") for name in self.network.changing()):
            return True
        self._notices.tell(
            "constant",
            "moon: nothing before the class weights trains, so method.representation=feature is constant, its term has"
            " no gradient, and MOON is FedAvg (method.representation=projection trains otherwise)",
        )
        return False

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        earlier = with_prefix(state, _MODEL)
        # In a client's first round r_j would be r_g, and the term a constant.
        if not (earlier and self.contrasts()):
            return super().objective(client_data, broadcast, state)
        heads = Heads.from_message(broadcast)
        return FeatureContrast(heads, self.method, self.frozen_copy(), self.frozen_copy(earlier))

    def remember(self, client_data: ClientData, broadcast: Message, state: State) -> State:
        if not self.contrasts():
            return state
        return {**state, **{_MODEL + name: value.clone() for name, value in self.network.state().items()}}


@dataclass
class MOON(GradientMethod):
    name: ClassVar[str] = "moon"
    search: ClassVar[Mapping[str, str]] = {"mu": "log(0.1,10)"}
    client_half = MOONClient

    mu: float = knob(1.0, least=0)
    tau: float = knob(0.5, above=0)
    representation: str = knob("feature", choices=("feature", "projection"))
    width: int = knob(256, least=1, of="representation=projection")

    def start(self, context: Context) -> Trainable:
        """The backbone; with representation=projection, r = U2 relu(U1 z) follows it as the end of the body."""
        start = super().start(context)
        if self.representation != "projection":
            return start
        seed = derived_seed(context.seed, "projection")
        return replace(
            start,
            build=partial(projecting, start, self.width, seed),
            dimension=self.width,
            stages=tuple(f"backbone.{stage}" for stage in start.stages),
        )


def projecting(start: Trainable, width: int, seed: int) -> torch.nn.Module:
    """The body of `start` and two layers of `width` after it, uniform within 1/sqrt(inputs), biases 0."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for inputs in (start.dimension, width):
        layer = linear_to_fill(inputs, width)
        with torch.no_grad():
            layer.weight.copy_((2 * torch.rand(width, inputs, generator=generator) - 1) / inputs**0.5)
            layer.bias.zero_()
        layers.append(layer)
    body = torch.nn.Sequential()
    body.add_module("backbone", start.build())
    body.add_module("projection", torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1]))
    return body
