"""LoRM: low-rank updates merged in closed form (Salami et al., ICLR 2025; the public code is fed-mammoth).

Every task brings an update B A of each chosen linear layer W_0 of a frozen vision transformer: B (o, r) is zero at
first, A (r, i) is drawn. The clients train one factor per round, B in the first, A in the next, while the other stays
as everyone has it. Client k sends the factor that it trained and the Gram matrix of that factor's inputs. With
G_k = X_k'X_k of the layer's inputs X_k (rows, i), taken after training, this is A G_k A' for B, and G_k for A. The
server takes the factor that comes closest to all clients' outputs, min sum_k ||(B A - B_k A_k) X_k'||^2:

    B = (sum_k B_k A G_k A')(sum_k A G_k A')^+,    A = (sum_k A_k G_k)(sum_k G_k)^+,

and where no client has an input, their average. Class weights are merged like A, with the Gram matrix of the features;
biases are averaged by samples. Grams are damped before they are sent, alpha G + (1 - alpha) diag(G); with alpha = 0
only the diagonal travels.

After the last round of task t the clients' Grams under the task's last model are summed to G_t, and the tasks' updates
are merged in the same way: P += B_t A_t G_t, R += G_t, and W_0 + P R^+ predicts (where no task has an input, the mean
of the updates). Within a task, W_0 + the mean of the updates predicts, and Grams are taken under it. Training runs on
W_0 + B_t A_t alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augment, Samples
from fcl_bench.errors import UserError, require_memory
from fcl_bench.linalg.solve import relative_rounding
from fcl_bench.linalg.tensors import with_prefix
from fcl_bench.methods.gradient.client import MODEL, GradientClient, final_prefix
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.methods.transformers.low_rank import LowRankMethod, factor_name, factors, low_rank_layers
from fcl_bench.methods.transformers.regmean import GRAM, RegressionSums, damped, declared_gram, weighted
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import EACH, MEAN, SUM, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from fcl_bench.training.layer_inputs import HEADS, layer_grams
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.trainer import forward_batch

#: The stage after a task's rounds, in which Grams under its last model travel.
GRAMS = "grams"
#: The beginning of the names of the layers' Gram matrices, and of those of the inputs of factors B, in an upload.
_LAYERS, _FACTORS = f"{GRAM}body.", f"{GRAM}factor."


class LoRMClient(GradientClient):
    """Trains one factor of every update, and class weights; then computes the Gram matrices of their inputs."""

    method: LoRM

    def beside(self, client_data: ClientData, broadcast: Message, state: State, new: State) -> dict[str, torch.Tensor]:
        merged_by = self.method.merged_by(self.network, client_data.task)
        return self._grams(client_data, broadcast, set(merged_by.values())) if merged_by else {}

    def take_over(self, client_data: ClientData, broadcast: Message) -> None:
        super().take_over(client_data, broadcast)
        for task in range(client_data.task):
            self.network.load(with_prefix(broadcast, final_prefix(task)))
        if broadcast.stage == MODEL:
            frozen = self.method.frozen_factors(self.network, client_data.task, int(broadcast["round"]))
            self.prepare(Heads.from_message(broadcast), frozen)
            act(self.network, client_data.task)

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """The Grams of the layers under the task's last model."""
        layers = [GRAM + path for path in low_rank_layers(self.network.body)]
        return Message(self._grams(client_data, broadcast, layers)), state

    def _grams(self, client_data: ClientData, broadcast: Message, fields: Collection[str]) -> dict[str, torch.Tensor]:
        """The damped Gram matrices with these names, under W_0 + the mean of the tasks' updates, in float64.

        The images are augmented as in training.
        """
        layers, damping = low_rank_layers(self.network.body), self.method.damping
        modules: dict[str, torch.nn.Module] = {**layers}
        if GRAM + HEADS in fields:
            modules[HEADS] = self.network.heads
        diagonal = [name for name in modules if damping(name) == 0]
        act(self.network)
        seed = derived_seed(self.context.seed, "grams", client_data.task, broadcast.round, client_data.client)
        generator, augment = torch.Generator().manual_seed(seed), Augment(self.method.training.augment)
        samples = Samples(client_data.inputs, client_data.labels)
        batches = samples.batches(forward_batch(client_data.inputs.device), augment, generator)
        found = layer_grams(self.trainer, self.network, (images for images, _ in batches), modules, diagonal)
        found = {name: damped(G, damping(name)) for name, G in found.items()}
        grams = {GRAM + name: G for name, G in found.items() if GRAM + name in fields}
        for path, layer in layers.items():
            for part in layer.parts:
                if (name := f"{_FACTORS}{path}.{part}") in fields:  # A x, the inputs of B
                    A = layer.A[factor_name(part, client_data.task)].detach()
                    grams[name] = weighted(A, found[path]) @ A.double().T
        return grams


class LoRMServer(GradientServer):
    """Merges factor by factor, and after a task the tasks' updates. It keeps only sums of uploads."""

    method: LoRM
    state = ("_tasks", "_merged_tasks")

    def __init__(self, method: LoRM, context: Context) -> None:
        super().__init__(method, context)
        rounding = relative_rounding(context.dtype, context.wire.dtype)
        #: Sums over the clients of the round at hand; sums over the tasks, P by layer and part and R by layer.
        self._clients, self._tasks = RegressionSums(rounding), RegressionSums(rounding)
        self._merged_tasks = 0

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self._put_merged()

    def broadcast(self, task: Task, round_: int) -> Message:
        """As in any gradient method, but the factor that does not train in this round is sent like the one that does.

        Factors of earlier tasks have the names under which they went down in the last stage of their task.
        """
        self._clients.clear()
        in_training = self.method.stages(task)[round_] == MODEL
        model_round = self.method.model_round(task, round_)
        frozen = self.method.frozen_factors(self.network, task.index, model_round) if in_training else set()
        self.prepare(self.heads, frozen)
        message = super().broadcast(task, round_)
        of_task = {name: of for of in range(task.index) for name in factors(self.network.body, of)}
        renamed = {name: final_prefix(of_task[name]) + name if name in of_task else name for name in message}
        once = {renamed[name] for name in message.cached if name not in frozen}
        return dataclasses.replace(
            message, tensors={renamed[name]: value for name, value in message.items()}, cached=once
        )

    def matching(self, name: str) -> Mapping[str, torch.Tensor]:
        prefix = name.removesuffix("*")
        if prefix not in (_LAYERS, _FACTORS):
            return super().matching(name)
        shapes = self.method.gram_shapes(self.network)
        sent = shapes if self.stage == GRAMS else set(self.method.merged_by(self.network, self.task).values())
        return {
            field: torch.empty(shape, device="meta")
            for field, shape in shapes.items()
            if field.startswith(prefix) and field in sent
        }

    def absorb_model(self, client: int, upload: Message) -> None:
        super().absorb_model(client, upload)
        merged_by = self.method.merged_by(self.network, self.task)
        self._clients.add({name: upload[name] for name in merged_by.values()}, upload, merged_by)

    def absorb_answer(self, client: int, upload: Message) -> None:
        self._clients.add(upload, {}, {})

    def aggregated(self, mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The merge of the parameters that have Grams, and the mean of all others."""
        return {**mean, **self._clients.merged(self.method.merged_by(self.network, self.task), mean)}

    def finish_stage(self) -> None:
        """P += B A G, R += G; then make the model that predicts."""
        if self.stage != GRAMS:
            return
        for path, layer in low_rank_layers(self.network.body).items():
            if (G := self._clients.grams.get(GRAM + path)) is not None:  # None if nobody has a label of the task.
                deltas = {f"{path}.{part}": layer.delta(part, self.task).detach() for part in layer.parts}
                self._tasks.add({path: G}, deltas, dict.fromkeys(deltas, path))
        self._clients.clear()
        self._merged_tasks = self.task + 1
        self._put_merged()

    @torch.no_grad()
    def _put_merged(self) -> None:
        """Predict with P R^+ if all tasks so far are in it, else with the mean of the tasks' updates."""
        whole = self._merged_tasks == len(self.tasks)
        for path, layer in low_rank_layers(self.network.body).items():
            parts = layer.parts if whole and path in self._tasks.grams else ()
            mean = {f"{path}.{part}": layer.mean_delta(part) for part in parts}
            merged = self._tasks.merged(dict.fromkeys(mean, path), mean)
            layer.merged = {part: merged[f"{path}.{part}"].float() for part in parts}

    def model(self) -> dict[str, torch.Tensor]:
        """As in any gradient method, and `delta.<layer>.<part>` (o, i), which is added to the frozen weights."""
        layers = low_rank_layers(self.network.body)
        deltas = {
            f"delta.{path}.{part}": delta for path, layer in layers.items() for part, delta in layer.merged.items()
        }
        return {**super().model(), **deltas}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        super().load_model(model, tasks)
        for path, layer in low_rank_layers(self.network.body).items():
            # Without Gram matrices nothing is merged: the mean of the tasks' updates predicts.
            names = {part: f"delta.{path}.{part}" for part in layer.parts}
            layer.merged = {part: model[name] for part, name in names.items() if name in model}

    def restored(self) -> None:
        self._put_merged()


def act(network: Network, task: int | None = None) -> None:
    """Let the update of one task act on the network alone, as in training; None: the mean of all tasks'."""
    for layer in low_rank_layers(network.body).values():
        layer.act(task)


@dataclass
class LoRM(LowRankMethod):
    name: ClassVar[str] = "lorm"
    search: ClassVar[Mapping[str, str]] = {"training.lr": "log(1e-4,1e-2)", "alpha_head": "0,0.5,1"}
    averaged_with: ClassVar[str] = "method.merge=average"
    client_half = LoRMClient
    server_half = LoRMServer

    training: Training = field(
        default_factory=lambda: Training(rounds=5, batch_size=16, optimizer="adamw", lr=3e-4, weight_decay=0.0)
    )
    rank: int = knob(16, least=1)
    targets: list[str] = knob(lambda: ["qkv", "proj", "fc1", "fc2"])
    alpha: float = knob(0.0, least=0, most=1)
    alpha_head: float = knob(0.5, least=0, most=1)
    merge: str = knob("grams", choices=("grams", "average"))

    @property
    def aggregation(self) -> str:  # type: ignore[override]
        """Each factor is multiplied by its client's Gram matrices, unless factors are averaged."""
        return MEAN if self.merge == "average" else EACH

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages = super().uploads(context)
        if self.merge == "average":
            return stages
        merged_by = {
            f"{_LAYERS}*": declared_gram("i", self.alpha),
            f"{_FACTORS}*": declared_gram("r", 1.0),
            GRAM + HEADS: declared_gram("d", self.alpha_head),
        }
        layers = {f"{_LAYERS}*": declared_gram("i", self.alpha, combine=SUM)}
        return {**stages, MODEL: {**stages[MODEL], **merged_by}, GRAMS: layers}

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        self.require(": clients do not have the model that predicts, P R^+", ccvr="none")
        if self.merge == "grams":
            why = ": method.merge=grams makes the new model itself"
            self.require(why, ", or method.merge=average", server_optimizer="average")
        layers = low_rank_layers(self.build_network(context).body)
        for path, layer in layers.items():
            least = min(layer.linear.in_features, *(end - begin for begin, end in layer.parts.values()))
            if self.rank > least:
                raise UserError(f"method.rank={self.rank} for {path}", f"at most {least}, the smaller of its sides")
        if self.merge == "grams" and self.alpha:
            size = 8 * sum(layer.linear.in_features**2 for layer in layers.values())
            require_memory(f"method.alpha={self.alpha:g}", 2 * size, "the Gram matrices (method.alpha=0: diagonals)")

    def stages(self, task: Task) -> list[str]:
        return [*super().stages(task), *([GRAMS] if self.merge == "grams" else [])]

    def grow(self, network: Network, sizes: list[int], seed: int) -> None:
        super().grow(network, sizes, seed)
        act(network)

    def frozen_factors(self, network: Network, task: int, round_: int) -> set[str]:
        """The factors that do not train in a round of the model: A in rounds 0, 2, 4, ..., B in the others."""
        if self.merge == "average":
            return set()
        return {name for name, which in factors(network.body, task).items() if which == "AB"[round_ % 2]}

    def damping(self, layer: str) -> float:
        """alpha of a layer's Gram matrices."""
        return self.alpha_head if layer == HEADS else self.alpha

    def merged_by(self, network: Network, task: int) -> dict[str, str]:
        """The parameters that train now and are merged by a Gram matrix, with its name in the upload."""
        if self.merge == "average":
            return {}
        found = {f"{HEADS}.{head}.weight": GRAM + HEADS for head in range(len(network.heads))}
        for path, layer in low_rank_layers(network.body).items():
            for part in layer.parts:
                found[f"{path}.A.{factor_name(part, task)}"] = GRAM + path
                found[f"{path}.B.{factor_name(part, task)}"] = f"{_FACTORS}{path}.{part}"
        return {name: found[name] for name in network.changing() if name in found}

    def gram_shapes(self, network: Network) -> dict[str, tuple[int, ...]]:
        """The shapes of the Gram matrices of the inputs of layers and of factors B, by name in the upload."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path, layer in low_rank_layers(network.body).items():
            side = layer.linear.in_features
            shapes[GRAM + path] = (side, side) if self.alpha else (side,)
            shapes |= {f"{_FACTORS}{path}.{part}": (self.rank, self.rank) for part in layer.parts}
        return shapes
