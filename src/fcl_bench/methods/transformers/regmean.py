"""RegMean: linear layers averaged by least squares on their inputs (Jin et al., ICLR 2023), round by round.

Clients train as in fedavg. Besides its model client k sends G_k = X_k'X_k of each linear layer that trained (the
heads, and those of the body), where X_k (rows, i) are the layer's inputs under the client's own trained model, one row
for each sample or token. The server takes the layer that comes closest to what all clients make of their inputs,

    W = argmin_W sum_k ||(W - W_k) X_k'||^2 = (sum_k W_k G_k)(sum_k G_k)^+,

and where no client has an input, the clients' average. A bias that trains is the weight of one more input, which
is always 1: W_k is then (o, i + 1), and G_k (i + 1, i + 1). All other parameters are averaged as in fedavg. With
`damping` alpha below 1, alpha G_k + (1 - alpha) diag(G_k) takes the place of G_k; with 0 only the diagonal travels.

With `local=ridge` clients do not train: on features X_k and one-hot labels Y_k, and without a bias, client k's own
least squares on X_k and on sqrt(gamma) I with labels 0 is W_k = C_k^-1 X_k'Y_k, with C_k = X_k'X_k + gamma I the Gram
matrix of both. Over all clients and tasks so far, K of them, the same average is

    W = (sum_k C_k - K gamma I)^+ (sum_k C_k W_k)                                  (W transposed: (d, C))

once the rows that nobody has are taken out of the Gram matrices again. That is AFL, its Eq. 9-16.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from fcl_bench.config import knob
from fcl_bench.errors import require_memory
from fcl_bench.linalg.local_ridge import local_ridge
from fcl_bench.linalg.solve import relative_rounding, solve_symmetric
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.model_holder import MODEL
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.methods.transformers.regression_mean import GRAM, RegressionSums, damped, declared_gram
from fcl_bench.protocol.context import ClientData, Context, Prediction, State, Task, TestBatch
from fcl_bench.protocol.fields import CLASSES, EACH, MOMENTS, SUM, SUMS, Schema, gram_matrix, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Server
from fcl_bench.tracking.console import Notices
from fcl_bench.training.layer_inputs import HEADS, layer_grams
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import forward_batch

log = logging.getLogger(__name__)


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


class RidgeClient(GradientClient):
    """Solves its own least squares in place of training."""

    method: RegMean

    def __init__(self, method: RegMean, context: Context) -> None:
        super().__init__(method, context)
        self._notices = Notices(log)

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """C_k (d, d) and W_k (d, c), the columns of the task's classes; in a sum C_k W_k in place of W_k."""
        Y = (client_data.labels.unsqueeze(1) == broadcast["columns"].to(client_data.labels.device)).to(
            client_data.inputs.dtype
        )
        C, W, trouble = local_ridge(client_data.inputs, Y, self.method.gamma)
        if trouble:
            self._notices.tell("client", f"a client's own solution with method.gamma={self.method.gamma:g}: {trouble}")
        return Message({"C": C, "B": C @ W} if self.context.sums else {"C": C, "W": W}), state


class RidgeMeanServer(GradientServer):
    """Merges the solutions of all clients of all tasks so far. The heads stay as they were drawn, and are not used.

    Attributes:
        C: (d, d) the sum of C_k.
        B: (d, classes) the sum of C_k W_k.
        uploads: K, the number of uploads so far.
        W: (d, classes) the merge.
    """

    method: RegMean
    counted = ()
    state = ("C", "B", "uploads")

    def __init__(self, method: RegMean, context: Context) -> None:
        super().__init__(method, context)
        d = self.start.dimension
        self.C = torch.zeros(d, d, dtype=context.dtype, device=context.device)
        self.B = self.W = self.C[:, :0]
        self.uploads = 0
        self._condition: float | None = None
        self._trouble = ""

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.B = torch.nn.functional.pad(self.B, (0, task.columns_seen - self.B.shape[1]))

    def broadcast(self, task: Task, round_: int) -> Message:
        """`columns`, the task's classes. Nothing else is needed."""
        self.stage = self.method.stages(task)[round_]
        return Message({"columns": torch.tensor(task.columns, dtype=torch.int32)}, self.stage)

    def absorb(self, client: int, upload: Message) -> None:
        columns = torch.tensor(self.tasks[-1], device=self.B.device)
        self.C += upload["C"]
        self.B.index_add_(1, columns, upload["B"] if "B" in upload else upload["C"] @ upload["W"])
        self.uploads += upload.clients

    def finish_round(self) -> None:
        self._merge()
        if self._trouble:
            self._notices.tell("merge", f"method=regmean with method.gamma={self.method.gamma:g}: {self._trouble}")

    def _merge(self) -> None:
        rounding = relative_rounding(self.context.dtype, self.context.wire.dtype)
        solution = solve_symmetric(self.C, self.B, rounding, -self.uploads * self.method.gamma)
        self.W, self._condition, self._trouble = solution

    def classify(self, batch: TestBatch) -> Prediction:
        return Prediction(batch.inputs @ self.W)

    def report(self) -> dict[str, Any]:
        """As any method that solves, `condition`, and `trouble`, null for none."""
        return {**super().report(), "condition": self._condition, "trouble": self._trouble or None}

    def model(self) -> dict[str, torch.Tensor]:
        """`W` (d, classes) on features."""
        return {"W": self.W}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        self.W = model["W"]

    def restored(self) -> None:
        self._merge()


@dataclass
class RegMean(GradientMethod):
    """Knobs of RegMean.

    Args:
        damping: alpha, what is left of the entries of Gram matrices off the diagonal; 1: all; 0: diagonals travel.
        local: what clients do: sgd, ridge (their own ridge regressions on features, one round per task; besides gamma
            only training.fraction counts).
        gamma: of local=ridge, every client's regulariser, which the server takes out again; 0: Moore-Penrose solutions.
    """

    name: ClassVar[str] = "regmean"
    search: ClassVar[Mapping[str, str]] = {"damping": "0,0.1,0.5,0.9"}
    aggregation: ClassVar[str] = EACH
    averaged_with: ClassVar[str] = "method.local=ridge method.trains=features, or method=fedavg"

    damping: float = knob(0.1, least=0, most=1)
    local: str = knob("sgd", choices=("sgd", "ridge"))
    gamma: float = knob(1.0, least=0)

    def client(self, context: Context) -> Client:
        return (RidgeClient if self.local == "ridge" else RegMeanClient)(self, context)

    def server(self, context: Context) -> Server:
        return (RidgeMeanServer if self.local == "ridge" else RegMeanServer)(self, context)

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        self.require(": method=regmean makes the new model itself", server_optimizer="average")
        if self.local == "ridge":
            why = ": method.local=ridge is on features"
            self.require(why, ", or method.local=sgd", trains="features", ccvr="none")
            return
        network = self.build_network(context)
        self.grow(network, [1], seed=0)
        size = 8 * sum(math.prod(shape) for shape in self.gram_shapes(network).values())
        remedy = "the Gram matrices (method.damping=0: diagonals)"
        require_memory(f"method.damping={self.damping:g}", 2 * size, remedy)

    def uploads(self, context: Context) -> dict[str, Schema]:
        if self.local == "ridge":
            # C W are the class sums.
            columns = real("d", "c", combine=SUM if context.sums else EACH, columns=CLASSES, leaks=SUMS)
            C = gram_matrix("d", combine=SUM, leaks=MOMENTS)
            return {MODEL: {"C": C, "B" if context.sums else "W": columns}}
        stages = super().uploads(context)
        return {**stages, MODEL: {**stages[MODEL], f"{GRAM}*": declared_gram("i", self.damping)}}

    def stages(self, task: Task) -> list[str]:
        return [MODEL] if self.local == "ridge" else super().stages(task)

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
