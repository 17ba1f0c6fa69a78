"""RegMean: linear layers averaged by least squares on their inputs (Jin et al., ICLR 2023), round by round.

Clients train as in fedavg. Besides its model client k sends G_k = X_k'X_k of each linear layer that trained (the
heads, and those of the body), where X_k (rows, i) are the layer's inputs under the client's own trained model, one row
for each sample or token. The server takes the layer that comes closest to what all clients make of their inputs,

    W = argmin_W sum_k ||(W - W_k) X_k'||^2 = (sum_k W_k G_k)(sum_k G_k)^+,

and where no client has an input, the clients' average. A bias that trains is the weight of one more input, which
is always 1: W_k is then (o, i + 1), and G_k (i + 1, i + 1). All other parameters are averaged as in fedavg. With
`damping` alpha below 1, alpha G_k + (1 - alpha) diag(G_k) takes the place of G_k; with 0 only the diagonal travels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fcl_bench.config import knob
from fcl_bench.errors import require_memory
from fcl_bench.linalg.solve import relative_rounding, solve_symmetric
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import MODEL, GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import EACH, MOMENTS, Field, Schema, Side, gram_matrix, real
from fcl_bench.protocol.message import Message
from fcl_bench.training.layer_inputs import HEADS, layer_grams
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import forward_batch

#: The prefix of a layer's name that gives the name of its Gram matrix in an upload.
GRAM = "gram."


def declared_gram(side: Side, alpha: float, **known: Any) -> Field:
    """A client's damped Gram matrix, or its diagonal with alpha = 0; `known` are further attributes of `Field`."""
    if alpha == 0:
        return real(side, least=0, leaks=MOMENTS, **known)
    return gram_matrix(side, leaks=MOMENTS, **known)


def merged_weights(
    sums_WG: torch.Tensor, sums_G: torch.Tensor, near: torch.Tensor, rounding: float = 0.0
) -> torch.Tensor:
    """W (o, i) = (sum_k W_k G_k)(sum_k G_k)^+ in float64.

    Args:
        sums_WG: (o, i) the sum of `weighted(W_k, G_k)`.
        sums_G: (i, i) the sum of the Gram matrices, or (i,) that of their diagonals.
        near: (o, i) W where no client has an input (outside the range of the sum), such as the mean of the W_k. Weights
            that are the same at all clients then stay the same whatever the inputs are.
        rounding: relative error of the entries of the Gram matrices (`relative_rounding`); eigenvalues that are no
            larger than such errors count as no input.
    """
    G = sums_G.double()
    S = sums_WG.double() - weighted(near, G)
    if G.ndim == 1:
        W = torch.where(G > 0, S / torch.where(G > 0, G, torch.ones_like(G)), torch.zeros_like(S))
    else:
        W = solve_symmetric((G + G.T) / 2, S.T, rounding).W.T
    return near.double() + W


def weighted(W: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """W G (o, i) in float64 of W (o, i) and a Gram matrix (i, i) or its diagonal (i,)."""
    W, G = W.double(), G.double()
    return W * G if G.ndim == 1 else W @ G


def damped(G: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha G + (1 - alpha) diag(G) of a Gram matrix (i, i): smaller off-diagonal entries; a diagonal (i,) stays.

    Args:
        G: the Gram matrix of a layer's inputs.
        alpha: 1: G itself; 0: a diagonal matrix.
    """
    if G.ndim == 1 or alpha == 1:
        return G
    return (alpha * G).diagonal_scatter(G.diagonal())


class RegressionSums:
    """Running sums of W_k G_k and G_k over clients for many layers, in float64. Several W may share a G.

    Args:
        rounding: see `merged_weights`.

    Attributes:
        products: the sum of W_k G_k (o, i), by the name of W.
        grams: the sum of G_k (i, i) or (i,), by its own name.
    """

    state = ("products", "grams")

    def __init__(self, rounding: float = 0.0) -> None:
        self.rounding = rounding
        self.products: dict[str, torch.Tensor] = {}
        self.grams: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        self.products, self.grams = {}, {}

    def add(
        self, grams: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], merged_by: Mapping[str, str]
    ) -> None:
        """Add one client's weights and Gram matrices.

        Args:
            grams: G_k by name. Each is made symmetric, since the wire may round its two halves apart.
            weights: W_k by name; there may be others.
            merged_by: for each W, the name of its G.
        """
        own = {name: G.double() if G.ndim == 1 else (G.double() + G.double().T) / 2 for name, G in grams.items()}
        for name, by in merged_by.items():
            product = weighted(weights[name], own[by])
            self.products[name] = self.products[name] + product if name in self.products else product
        for name, G in own.items():
            self.grams[name] = self.grams[name] + G if name in self.grams else G

    def merged(self, merged_by: Mapping[str, str], near: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`merged_weights` of each W.

        Args:
            merged_by: for each W, the name of its G.
            near: each W where no client has an input.
        """
        return {
            name: merged_weights(self.products[name], self.grams[by], near[name], self.rounding)
            for name, by in merged_by.items()
        }


class Merged(NamedTuple):
    """A linear layer whose parameters are merged.

    Attributes:
        weight: its name in the network.
        bias: the same; "" where there is none that trains.
        inputs: the layer whose inputs it is merged by: its own name, or `HEADS` for every head.
        module: the layer.
    """

    weight: str
    bias: str
    inputs: str
    module: torch.nn.Linear

    def joint(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(o, i) the weight, or (o, i + 1) with the bias as its last column, in float64."""
        W = values[self.weight].double()
        return torch.cat([W, values[self.bias].double().unsqueeze(1)], dim=1) if self.bias else W

    def parted(self, joint: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weight and the bias that `joint` joined, in float32."""
        if not self.bias:
            return {self.weight: joint.float()}
        return {self.weight: joint[:, :-1].float(), self.bias: joint[:, -1].float()}


class RegMeanClient(GradientClient):
    """Trains as in fedavg, then computes the Gram matrices of the inputs of the linear layers that it trained."""

    method: RegMean

    def beside(self, client_data: ClientData, broadcast: Message, state: State, new: State) -> dict[str, torch.Tensor]:
        """The damped Gram matrices under the trained model, of samples without augmentation."""
        alpha = self.method.damping
        layers = self.method.merged(self.network)
        modules: dict[str, torch.nn.Module] = {layer.inputs: layer.module for layer in layers}
        constant = {layer.inputs for layer in layers if layer.bias}
        batches = client_data.inputs.split(forward_batch(client_data.inputs.device))
        diagonal = () if alpha else modules
        found = layer_grams(self.trainer, self.network, batches, modules, diagonal, constant)
        return {GRAM + name: damped(G, alpha) for name, G in found.items()}


class RegMeanServer(GradientServer):
    """Merges the linear layers. For each of them it keeps two sums of a round's uploads."""

    method: RegMean

    def __init__(self, method: RegMean, context: Context) -> None:
        super().__init__(method, context)
        #: The sums of (W_k - W) G_k, W as it was sent, and of G_k in the round at hand.
        self._clients = RegressionSums(relative_rounding(context.dtype, context.wire.dtype))

    def broadcast(self, task: Task, round_: int) -> Message:
        self._clients.clear()
        return super().broadcast(task, round_)

    def matching(self, name: str) -> Mapping[str, torch.Tensor]:
        if name != f"{GRAM}*":
            return super().matching(name)
        shapes = self.method.gram_shapes(self.network).items()
        return {GRAM + layer: torch.empty(shape, device="meta") for layer, shape in shapes}

    def absorb_model(self, client: int, upload: Message) -> None:
        super().absorb_model(client, upload)
        merged_by = {layer.weight: GRAM + layer.inputs for layer in self.method.merged(self.network)}
        grams = {name: upload[name] for name in dict.fromkeys(merged_by.values())}
        self._clients.add(grams, self._changes(upload), merged_by)

    def _changes(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By weight, its difference from the model that was sent."""
        return {
            layer.weight: layer.joint(values) - layer.joint(self.sent) for layer in self.method.merged(self.network)
        }

    def aggregated(self, mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """W + (sum_k (W_k - W) G_k)(sum_k G_k)^+ of the linear layers, and the mean of all else.

        Where no client has an input under its last model, it may have had some while it trained. There, too, the mean
        is taken.
        """
        layers, new = self.method.merged(self.network), dict(mean)
        merged = self._clients.merged({layer.weight: GRAM + layer.inputs for layer in layers}, self._changes(mean))
        for layer in layers:
            new |= layer.parted(layer.joint(self.sent) + merged[layer.weight])
        return new


@dataclass
class RegMean(GradientMethod):
    name: ClassVar[str] = "regmean"
    search: ClassVar[Mapping[str, str]] = {"damping": "0,0.1,0.5,0.9"}
    aggregation: ClassVar[str] = EACH
    averaged_with: ClassVar[str] = "method=fedavg"
    client_half = RegMeanClient
    server_half = RegMeanServer

    damping: float = knob(0.1, least=0, most=1)

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        self.require(": method=regmean makes the new model itself", server_optimizer="average")
        network = self.build_network(context)
        self.grow(network, [1], seed=0)
        size = 8 * sum(math.prod(shape) for shape in self.gram_shapes(network).values())
        remedy = "the Gram matrices (method.damping=0: diagonals)"
        require_memory(f"method.damping={self.damping:g}", 2 * size, remedy)

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages = super().uploads(context)
        return {**stages, MODEL: {**stages[MODEL], f"{GRAM}*": declared_gram("i", self.damping)}}

    def merged(self, network: Network) -> list[Merged]:
        """The linear layers whose weights train now."""
        changing, found = network.changing(), []
        # Layers of a derived class are left out, since they may do something else to their inputs first.
        body = [(f"body.{name}", module) for name, module in network.called_layers() if type(module) is torch.nn.Linear]
        heads = [(f"{HEADS}.{n}", head) for n, head in enumerate(network.heads) if isinstance(head, torch.nn.Linear)]
        for name, module in [*body, *heads]:
            weight, bias = f"{name}.weight", f"{name}.bias"
            if weight in changing:
                inputs = HEADS if name.startswith(f"{HEADS}.") else name
                found.append(Merged(weight, bias if bias in changing else "", inputs, module))
        return found

    def gram_shapes(self, network: Network) -> dict[str, tuple[int, ...]]:
        """The shape of every Gram matrix that travels, by the name of the layer."""
        sides = {layer.inputs: layer.module.in_features + bool(layer.bias) for layer in self.merged(network)}
        return {name: (side, side) if self.damping else (side,) for name, side in sides.items()}
