"""What FedProTIP and FOT share: subspaces of each layer's inputs per task, which later updates must not touch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augment
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.methods.projection.subspace import Projection, ProjectionAudit, project_out, sketch
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import Field, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from fcl_bench.training.layer_inputs import HEADS, layer_columns, projectable
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: `method.mass`: of a spectrum.
MASSES = ("sum", "energy")
#: The stage in which clients send what the subspaces are made of.
BASES = "bases"
#: Prefix of the names of a task's bases that still grow. The number of the turn, the task and the layer follow.
PART = "part"


def basis_name(task: int, layer: str) -> str:
    """The name under which the server keeps, and sends, Phi_layer^(task)."""
    return f"basis.{task}.{layer}"


def bases_in(named: Mapping[str, torch.Tensor], layer: str) -> torch.Tensor | None:
    """Phi^(1:t-1) (d_l, q) of a layer, and the existing part of Phi^(t), in the order of tasks; None: there is none."""
    parts = {name: name.split(".", 2) for name in named if name.startswith(("basis.", PART))}
    found = {int(task): named[name] for name, (_, task, of) in parts.items() if of == layer}
    return torch.cat([found[task] for task in sorted(found)], dim=1) if found else None


@dataclass
class ProjectedMethod(GradientMethod):
    """A method that protects the subspaces in which earlier tasks' layer inputs lie.

    Attributes:
        projected_decay: whether weight decay is projected with the gradient, where a client's steps are.
    """

    projected_decay: ClassVar[bool] = True

    training: Training = field(default_factory=Training)
    frozen_stages: int = knob(2, least=0)
    frozen_heads: bool = True
    frozen_head_age: int = knob(1, least=1)
    projected_heads: bool = False
    norms: str = knob("frozen", choices=("frozen", "decay", "train"))
    threshold: float = knob(0.7, above=0, most=1)
    threshold_step: float = knob(0.001, least=0)
    mass: str = knob("sum", choices=MASSES)
    share_of: str = knob("rest", choices=("rest", "inputs"))
    columns: int = knob(512, least=1)
    augmented_bases: bool = False
    variant: str = knob("working", choices=("working", "published"))
    theory: int = knob(0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share_of == "inputs":
            self.require(": method.share_of=inputs adds squares", mass="energy")

    def epsilon(self, task: int) -> float:
        """The threshold of a task."""
        return min(1.0, self.threshold + self.threshold_step * task)

    @property
    def power(self) -> int:
        """The power of the singular values in the spectrum's mass."""
        return {"sum": 1, "energy": 2}[self.mass]

    @property
    @abstractmethod
    def basis(self) -> Field:
        """What clients send of each layer in the stage `BASES`."""

    def uploads(self, context: Context) -> dict[str, Schema]:
        return {**super().uploads(context), BASES: {"*": self.basis}}

    @abstractmethod
    def sketch_width(self, side: int) -> int:
        """The columns of what clients send of a layer whose inputs have d_l = `side` numbers."""

    def stages(self, task: Task) -> list[str]:
        return [*super().stages(task), BASES]

    def projects_heads(self, recurring: bool) -> bool:
        """Whether the heads' inputs are protected: for all heads or, if classes come back, for those that they use."""
        return self.projected_heads or recurring

    def watches_heads(self, recurring: bool) -> bool:
        """Whether the heads' inputs have bases too."""
        return self.projects_heads(recurring)

    @property
    def projects_average(self) -> bool:
        """Whether the server projects the aggregated update."""
        return True

    def audits(self, context: Context) -> Mapping[str, Audit]:
        return {"bounds": ProjectionAudit(self, context)} if self.theory else {}

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        if not self.widths(self.build_network(context), context.recurring):
            raise UserError(
                f"method.trains={self.trains} and method.projected_heads=false leave {self.name} nothing to project",
                "method.projected_heads=true",
            )

    def widths(self, network: Network, recurring: bool = False) -> dict[str, int]:
        """d_l, the numbers in one column of inputs, of each layer that still trains after the first task."""
        frozen = super().frozen(network, 1) | network.never_trains
        trains = {name: value for name, value in network.named_parameters() if name not in frozen}
        weights = {layer: trains.get(f"{layer}.weight") for layer in projectable(network)}
        sides = {layer: weight.flatten(1).shape[1] for layer, weight in weights.items() if weight is not None}
        return sides | ({HEADS: network.dimension} if self.watches_heads(recurring) else {})

    def protected_weights(self, network: Network, reused: Container[int] = ()) -> dict[str, str]:
        """Parameter name -> layer, of the weights that are projected: the layers' own, and those of heads.

        Args:
            reused: earlier heads that score classes of the task; projected whether or not all heads are.
        """
        weights = {f"{layer}.weight": layer for layer in self.widths(network) if layer != HEADS}
        heads = [head for head in range(len(network.heads)) if self.projected_heads or head in reused]
        return weights | {f"{HEADS}.{head}.weight": HEADS for head in heads}

    def frozen(self, network: Network, task: int, reused: Container[int] = frozenset()) -> set[str]:
        names = super().frozen(network, task, reused)
        if not task:
            return names
        young = tuple(f"{HEADS}.{head}." for head in range(max(0, task + 1 - self.frozen_head_age), task))
        names = {name for name in names if not (young and name.startswith(young))}
        return names | self.unprojected(network, reused) if self.norms == "frozen" else names

    def unprojected(self, network: Network, reused: Container[int] = ()) -> set[str]:
        """Parameters that no projection protects, except those of heads that train freely."""
        heads = [head for head in range(len(network.heads)) if not self.projected_heads and head not in reused]
        free = tuple(f"{HEADS}.{head}." for head in heads)
        names = {name for name, _ in network.named_parameters()} - self.protected_weights(network, reused).keys()
        return {name for name in names if not name.startswith(free)}


class ProjectedObjective(Objective):
    """The loss of any gradient method, whose steps are projected; it may hold back what no projection protects.

    Every update of a projected weight W stays orthogonal to its layer's protected inputs: (W_new - W_old) Phi = 0
    (Eq. 4-5). The gradient is projected with weight decay in it, so that momentum adds up projected steps only
    (erratum 3). At the end of a round the whole update is projected once more, since float32 rounds every step. Without
    `projected_decay` the gradient alone is projected, as Eq. 4 has it, and weight decay pulls as it does elsewhere.

    Args:
        later: whether the task is not the first.
        projections: of the weights whose steps are projected, by name.
    """

    def __init__(
        self, heads: Heads, method: ProjectedMethod, network: Network, later: bool, projections: dict[str, Projection]
    ) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        # The weight decay that is in the gradients.
        self._decay = 0.0 if method.training.optimizer == "adamw" else method.training.weight_decay
        self._exact = method.projected_decay
        names = method.unprojected(network, heads.reused) if later and method.norms == "decay" else set()
        own = dict(network.named_parameters())
        self._decaying = [value for name, value in own.items() if name in names and value.requires_grad]
        self._projected = [(own[name], project, own[name].detach().clone()) for name, project in projections.items()]

    @torch.no_grad()
    def modify_gradients(self, network: Network) -> None:
        for value in self._decaying:
            if value.grad is not None:
                torch.mul(value, self._decay, out=value.grad)
        outside = 0.0 if self._exact else self._decay
        for weight, project, _ in self._projected:
            if weight.grad is not None:
                if outside:
                    weight.grad.sub_(weight, alpha=outside)
                project(weight.grad)
                if outside:
                    weight.grad.add_(weight, alpha=outside)
        super().modify_gradients(network)  # last: frozen rows have no weight decay either

    @torch.no_grad()
    def finish(self, network: Network) -> None:
        for weight, project, before in self._projected if self._exact else ():
            weight.sub_(before)
            project(weight)
            weight.add_(before)


class ProjectedClient(GradientClient):
    """Extracts activation columns under the task's last model."""

    method: ProjectedMethod

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        heads, task = Heads.from_message(broadcast), client_data.task
        return ProjectedObjective(heads, self.method, self.network, task > 0, self.projections(task, broadcast))

    def projections(self, task: int, broadcast: Message) -> dict[str, Projection]:
        """By weight whose local steps are projected, its projection."""
        return {}

    def images_of(self, client_data: ClientData) -> torch.Tensor:
        """The images (n, 3, h, w), or features (n, d), whose activations make the bases."""
        if not self.method.augmented_bases:
            return client_data.inputs
        seed = derived_seed(self.context.seed, "augmented bases", client_data.task, client_data.client)
        augment = Augment(self.method.training.augment)
        return augment(client_data.inputs, torch.Generator().manual_seed(seed))

    def sketched(self, client_data: ClientData, layer: str, A: torch.Tensor) -> torch.Tensor:
        """A random sketch of a layer's columns A (d_l, m), of the width that the method has."""
        seed = derived_seed(self.context.seed, f"sketch {layer}", client_data.task, client_data.client)
        return sketch(A, self.method.sketch_width(len(A)), torch.Generator().manual_seed(seed))

    def columns_of(self, client_data: ClientData) -> dict[str, torch.Tensor]:
        """(d_l, m_s) by layer, in float64, since a spectrum of differences follows."""
        seed = derived_seed(self.context.seed, "columns", client_data.task, client_data.client)
        layers = list(self.method.widths(self.network, self.context.recurring))
        generator = torch.Generator().manual_seed(seed)
        found = layer_columns(
            self.trainer, self.network, self.images_of(client_data), layers, self.method.columns, generator
        )
        return {layer: columns.double() for layer, columns in found.items()}


class ProjectedServer(GradientServer):
    """Keeps every task's bases.

    Attributes:
        bases: by `basis_name`, Phi^(t) (d_l, r_t) of a task and a layer in float32; all of a layer are orthonormal.
            Those of the task at hand grow from no columns.
        received: per layer, what the uploads of the round at hand make together.
    """

    method: ProjectedMethod
    state = ("bases",)

    def __init__(self, method: ProjectedMethod, context: Context) -> None:
        super().__init__(method, context)
        self.bases: dict[str, torch.Tensor] = {}
        self.received: dict[str, torch.Tensor] = {}

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if self.heads.reused and not self.context.recurring:
            raise ValueError(f"task {task.index} has classes of earlier tasks, and the problem is not `recurring`")
        for layer, side in self.widths().items():
            self.bases.setdefault(basis_name(task.index, layer), torch.zeros(side, 0, device=self.context.device))

    def aggregated(self, mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """W_old + (mean - W_old)(I - Phi Phi'), layer by layer: what the wire's rounding put into Phi is taken out."""
        projected = dict(mean)
        if not self.method.projects_average:
            return projected
        for name, layer in self.method.protected_weights(self.network, self.heads.reused).items():
            Phi = self.known(layer)
            if Phi.shape[1] and name in mean:
                old = self.sent[name].double()
                projected[name] = (old + project_out(mean[name].double() - old, Phi)).float()
        return projected

    def known(self, layer: str) -> torch.Tensor:
        """Phi^(1:t) (d_l, q) of a layer in float64."""
        Phi = bases_in(self.bases, layer)
        assert Phi is not None
        return Phi.double()

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        """All bases; each goes once to each client."""
        return super().extra_broadcast() | {name: basis for name, basis in self.bases.items() if basis.shape[1]}

    def matching(self, name: str) -> Mapping[str, torch.Tensor]:
        if self.stage != BASES:
            return super().matching(name)
        sides = self.widths().items()
        return {layer: torch.empty(side, self.method.sketch_width(side), device="meta") for layer, side in sides}

    def widths(self) -> dict[str, int]:
        """d_l of each layer whose inputs have bases."""
        return self.method.widths(self.network, self.context.recurring)

    @abstractmethod
    def new_basis(self, layer: str, received: torch.Tensor) -> torch.Tensor:
        """Phi^(t) (d_l, r_t) of the task at hand, orthonormal and orthogonal to the earlier ones, from the uploads."""

    def finish_stage(self) -> None:
        if self.stage != BASES:
            return
        for layer, side in self.widths().items():
            if layer in self.received:  # not of a task whose labels nobody knows
                name, new = basis_name(self.task, layer), self.new_basis(layer, self.received[layer])
                self.bases[name] = torch.cat([self.bases[name], new.float()], dim=1)
            if self.known(layer).shape[1] >= side:
                free = layer == HEADS and not self.method.projects_heads(self.context.recurring)
                what = "in a basis; later tasks have none there" if free else "protected; it learns no more"
                self._notices.tell(
                    layer,
                    f"{self.method.name}: after task {self.task} all {side} directions of {layer} are {what}"
                    " (a smaller method.threshold or method.columns)",
                )
        self.received = {}

    def ranks(self, layer: str) -> list[int]:
        """How many directions each task added to a layer's."""
        return [self.bases[basis_name(task, layer)].shape[1] for task in range(len(self.tasks))]

    def gates(self) -> dict[str, str]:
        """`idle_term` where the bases of earlier tasks hold nothing, or leave no direction, in all protected layers."""
        heads_too = self.method.projects_heads(self.context.recurring)
        sides = {layer: side for layer, side in self.widths().items() if layer != HEADS or heads_too}
        before = {layer: sum(self.ranks(layer)[:-1]) for layer in sides}
        if not sides or self.task == 0:
            return {}
        if not any(before.values()):
            return {"idle_term": "the bases of earlier tasks are empty: nothing is protected"}
        is_full = all(before[layer] >= side for layer, side in sides.items())
        return {"idle_term": "the bases of earlier tasks left no direction to learn in"} if is_full else {}

    def report(self) -> dict[str, Any]:
        """`ranks`: per layer, how many directions each task added; `dimensions`: how many there are."""
        widths = self.widths()
        return {"ranks": {layer: self.ranks(layer) for layer in widths}, "dimensions": widths}

    def model(self) -> dict[str, torch.Tensor]:
        return {**super().model(), **self.bases}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        super().load_model(model, tasks)
        self.bases = {name: value for name, value in model.items() if name.startswith("basis.")}
