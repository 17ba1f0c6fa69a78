"""What FedProTIP and FOT share: subspaces of each layer's inputs per task, which later updates must not touch.

`ProjectedDescent` projects every local step (FedProTIP Eq. 4-5).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Augment, augmented
from fcl_bench.errors import UserError
from fcl_bench.linalg.subspace import Projection, project_out
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.methods.projection.basis_names import basis_name
from fcl_bench.methods.projection.theory import ProjectionAudit
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.fields import Field, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.task import Task
from fcl_bench.randomness import derived_seed
from fcl_bench.tracking.console import Notices
from fcl_bench.training.layer_inputs import HEADS, layer_columns, projectable
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

log = logging.getLogger(__name__)

#: `method.mass`: of a spectrum.
MASSES = ("sum", "energy")
#: `method.share_of`: what the threshold is a share of.
SHARES = ("rest", "inputs")
#: `method.norms`: what becomes of parameters without an input subspace.
NORMS = ("frozen", "decay", "train")
#: The stage in which clients send what the subspaces are made of.
BASES = "bases"


@dataclass
class ProjectedMethod(GradientMethod):
    """A method that protects the subspaces in which earlier tasks' layer inputs lie.

    Args:
        frozen_stages, frozen_heads: as in any gradient method; here on by default (FedProTIP E.2).
        loss_over: as in any gradient method; here by default the task's own, as in both public codes.
        frozen_head_age: how many tasks old a head is when `frozen_heads` freezes it; 1: when the next task starts.
        projected_heads: whether the heads count among the layers whose updates are projected; if not, they train as
            in any gradient method, biases included, but for heads that score classes of earlier tasks again.
        norms: batch norms, biases and whatever else has no input subspace, after the first task: frozen, with their
            running statistics; decay: their statistics move, their parameters take weight decay alone; train.
        threshold: epsilon, the share of the spectrum's mass that a task's basis holds (Eq. 8).
        threshold_step: added to it at every task.
        mass: of a spectrum: sum (of singular values, Eq. 8), energy (of their squares, as in GPM).
        share_of: what the threshold is a share of: rest (of the inputs outside the earlier bases, Eq. 8), inputs (of
            the inputs, so that what the earlier bases hold of them counts already, as in GPM).
        columns: m_s, activation columns per client and layer.
        augmented_bases: whether they are of augmented images, as in training.
        variant: working; published: ranks as the public code counts them, one less than the threshold needs where it
            says so (docs/methods/fedprotip.md, docs/methods/fot.md). In the YAML other knobs' defaults follow from it.
        theory: reference samples per client and task for the estimates of rho and beta (Assumptions 4 and 5); 0: none.
    """

    frozen_stages: int = knob(2, least=0)
    frozen_heads: bool = True
    loss_over: str = knob("task", choices=("seen", "task"))
    frozen_head_age: int = knob(1, least=1)
    projected_heads: bool = False
    norms: str = knob("frozen", choices=NORMS)
    threshold: float = knob(0.7, above=0, most=1)
    threshold_step: float = knob(0.001, least=0)
    mass: str = knob("sum", choices=MASSES)
    share_of: str = knob("rest", choices=SHARES)
    columns: int = knob(512, least=1)
    augmented_bases: bool = False
    variant: str = knob("working", choices=("working", "published"))
    theory: int = knob(0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share_of == "inputs" and self.mass != "energy":
            raise UserError(f"method.mass={self.mass}: method.share_of=inputs adds squares", "method.mass=energy")

    def epsilon(self, task: int) -> float:
        """The threshold of a task."""
        return min(1.0, self.threshold + self.threshold_step * task)

    @property
    def power(self) -> int:
        """The power of the singular values in the spectrum's mass."""
        return {"sum": 1, "energy": 2}[self.mass]

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

    @property
    def decay(self) -> float:
        """The weight decay that is in the gradients of `Objective.modify_gradients`."""
        return 0.0 if self.training.optimizer == "adamw" else self.training.weight_decay

    def audits(self, context: Context) -> Mapping[str, Audit]:
        return {"bounds": ProjectionAudit(self, context)} if self.theory else {}

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        if not self.layers(self.build_network(context), context.recurring):
            raise UserError(
                f"method.on={self.on} and method.projected_heads=false leave method={self.name} nothing to project",
                "method.projected_heads=true",
            )

    def layers(self, network: Network, recurring: bool = False) -> list[str]:
        """The layers that still train after the first task, so that their inputs are to be protected.

        Args:
            network: with the weights.
            recurring: see `Context`.
        """
        frozen = super().frozen(network, network.stages, 1)
        trains = {name for name, value in network.named_parameters() if name not in network.never_trains | frozen}
        heads = [HEADS] if self.watches_heads(recurring) else []
        return [*(name for name in projectable(network) if f"{name}.weight" in trains), *heads]

    def protected_weights(self, network: Network, reused: Container[int] = ()) -> dict[str, str]:
        """Parameter name -> layer, of the weights that are projected: the layers' own, and those of heads.

        Args:
            network: with the weights.
            reused: earlier heads that score classes of the task; projected whether or not all heads are.
        """
        weights = {f"{layer}.weight": layer for layer in self.layers(network) if layer != HEADS}
        heads = [head for head in range(len(network.heads)) if self.projected_heads or head in reused]
        return weights | {f"{HEADS}.{head}.weight": HEADS for head in heads}

    def widths(self, network: Network, recurring: bool = False) -> dict[str, int]:
        """d_l of each of the `layers`, the numbers in one column of its inputs."""
        own = dict(network.named_parameters())
        sides = {layer: own[f"{layer}.weight"].flatten(1).shape[1] for layer in self.layers(network) if layer != HEADS}
        return sides | ({HEADS: network.dimension} if self.watches_heads(recurring) else {})

    def frozen(
        self, network: Network, stages: tuple[str, ...], task: int, reused: Container[int] = frozenset()
    ) -> set[str]:
        """Names that are frozen; after the first task perhaps batch norms and biases, which have no input subspace."""
        names = super().frozen(network, stages, task, reused)
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
    """The loss of any gradient method; it may hold back parameters that no projection protects.

    Args:
        heads: see `Objective`.
        method: the knobs.
        network: before the first step.
        later: whether the task is not the first.
    """

    def __init__(self, heads: Heads, method: ProjectedMethod, network: Network, later: bool) -> None:
        super().__init__(heads, method.loss_over, method.frozen_heads)
        self._decay = method.decay
        names = method.unprojected(network, heads.reused) if later and method.norms == "decay" else set()
        self._decaying = [value for name, value in network.named_parameters() if name in names and value.requires_grad]

    @torch.no_grad()
    def modify_gradients(self, network: Network) -> None:
        for value in self._decaying:
            if value.grad is not None:
                torch.mul(value, self._decay, out=value.grad)
        super().modify_gradients(network)  # last: rows at rest do not decay either


class ProjectedClient(GradientClient):
    """Extracts activation columns under the task's last model."""

    method: ProjectedMethod

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        return ProjectedObjective(Heads.from_message(broadcast), self.method, self.network, client_data.task > 0)

    def images_of(self, client_data: ClientData) -> torch.Tensor:
        """The images (n, 3, h, w), or features (n, d), whose activations make the bases."""
        if not self.method.augmented_bases:
            return client_data.inputs
        seed = derived_seed(self.context.seed, "augmented bases", client_data.task, client_data.client)
        augment = Augment(self.method.training.augment)
        return augmented(client_data.inputs, augment, torch.Generator().manual_seed(seed))

    def columns_of(self, client_data: ClientData) -> dict[str, torch.Tensor]:
        """Return (d_l, m_s) per layer, in float64, since a spectrum of differences follows."""
        seed = derived_seed(self.context.seed, "columns", client_data.task, client_data.client)
        layers = self.method.layers(self.network, self.context.recurring)
        generator = torch.Generator().manual_seed(seed)
        found = layer_columns(
            self.trainer, self.network, self.images_of(client_data), layers, self.method.columns, generator
        )
        return {layer: columns.double() for layer, columns in found.items()}


class ProjectedServer(GradientServer):
    """Keeps every task's bases.

    Attributes:
        bases: per layer, Phi^(t) (d_l, r_t) of each task, orthonormal all together, in float32.
        received: per layer, what the uploads of the round at hand make together.
    """

    method: ProjectedMethod

    def __init__(self, method: ProjectedMethod, context: Context) -> None:
        super().__init__(method, context)
        self.bases: dict[str, list[torch.Tensor]] = {}
        self.received: dict[str, torch.Tensor] = {}
        self._notices = Notices(log)

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if self.heads.reused and not self.context.recurring:
            raise ValueError(f"task {task.index} has classes of earlier tasks, and the problem is not `recurring`")
        for layer in self.method.layers(self.network, self.context.recurring):
            self.bases.setdefault(layer, [])

    def aggregated(self, mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """W_old + (mean - W_old)(I - Phi Phi'), layer by layer: what the wire's rounding put into Phi is taken out."""
        projected = dict(mean)
        if not self.method.projects_average:
            return projected
        for name, layer in self.method.protected_weights(self.network, self.heads.reused).items():
            Phi = self.known(layer)
            if Phi is not None and name in mean:
                old = self.sent[name].double()
                projected[name] = (old + project_out(mean[name].double() - old, Phi)).float()
        return projected

    def known(self, layer: str) -> torch.Tensor | None:
        """Phi^(1:t) (d_l, q) of a layer in float64; None before the end of the first task."""
        return torch.cat(self.bases[layer], dim=1).double() if self.bases[layer] else None

    def basis_before(self, layer: str, like: torch.Tensor) -> torch.Tensor:
        """`known`, or a matrix without columns whose rows are those of `like`."""
        known = self.known(layer)
        return like.new_zeros(len(like), 0) if known is None else known

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        """All bases; each goes once to each client."""
        known = {name: basis for name, basis in self._named_bases().items() if basis.shape[1]}
        return super().extra_broadcast() | known

    def expects_answer(self) -> Schema:
        return {layer: self.expects_basis(layer, side) for layer, side in self.widths().items()}

    def widths(self) -> dict[str, int]:
        """d_l of each layer whose inputs have bases."""
        return self.method.widths(self.network, self.context.recurring)

    @abstractmethod
    def expects_basis(self, layer: str, side: int) -> Field:
        """What clients send of a layer whose inputs have d_l = `side` numbers."""

    @abstractmethod
    def new_basis(self, layer: str, received: torch.Tensor) -> torch.Tensor:
        """Phi^(t) (d_l, r_t) of the task at hand, orthonormal and orthogonal to the earlier ones, from the uploads."""

    def finish_stage(self) -> None:
        if self.stage != BASES:
            return
        for layer, side in self.widths().items():
            bases = self.bases[layer]
            if len(bases) == self.task:
                bases.append(torch.zeros(side, 0, device=self.context.device))
            if layer in self.received:  # not of a task whose labels nobody knows
                bases[-1] = torch.cat([bases[-1], self.new_basis(layer, self.received.pop(layer)).float()], dim=1)
            if sum(basis.shape[1] for basis in bases) >= side:
                free = layer == HEADS and not self.method.projects_heads(self.context.recurring)
                what = "in a basis; later tasks have none there" if free else "protected; it learns no more"
                self._notices.tell(
                    layer,
                    f"{self.method.name}: after task {self.task} all {side} directions of {layer} are {what}"
                    " (a smaller method.threshold or method.columns)",
                )

    def report(self) -> dict[str, Any]:
        """`ranks`: per layer, how many directions each task added; `dimensions`: how many there are."""
        return {
            "ranks": {layer: [basis.shape[1] for basis in bases] for layer, bases in self.bases.items()},
            "dimensions": self.widths(),
        }

    def model(self) -> dict[str, torch.Tensor]:
        return {**super().model(), **self._named_bases()}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        super().load_model(model, tasks)
        self.load_bases(model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**super().state_dict(), **self._named_bases()}

    def _named_bases(self) -> dict[str, torch.Tensor]:
        return {
            basis_name(task, layer): basis for layer, bases in self.bases.items() for task, basis in enumerate(bases)
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        super().load_state_dict(state)
        self.load_bases(state)

    def load_bases(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the parts of a state or a model that depend on the bases."""
        self.bases = {layer: [] for layer in self.method.layers(self.network, self.context.recurring)}
        for layer, bases in self.bases.items():
            while (name := basis_name(len(bases), layer)) in state:
                bases.append(state[name].to(self.context.device))


class ProjectedDescent(ProjectedObjective):
    """Every update of a weight W stays orthogonal to its layer's protected inputs: (W_new - W_old) Phi = 0 (Eq. 4-5).

    The gradient is projected with weight decay in it, so that momentum adds up projected steps only (erratum 3). At the
    end of a round the whole update is projected once more, since float32 rounds every step.

    Args:
        heads, method, network, later: see `ProjectedObjective`.
        projections: of parameters, by name.
        exact: False: the gradient alone is projected, as Eq. 4 has it, and weight decay pulls as it does elsewhere.
    """

    def __init__(
        self,
        heads: Heads,
        method: ProjectedMethod,
        network: Network,
        later: bool,
        projections: dict[str, Projection],
        exact: bool = True,
    ) -> None:
        super().__init__(heads, method, network, later)
        self._outside, self._exact = 0.0 if exact else method.decay, exact
        own = dict(network.named_parameters())
        self._projected = [(own[name], project, own[name].detach().clone()) for name, project in projections.items()]

    @torch.no_grad()
    def modify_gradients(self, network: Network) -> None:
        for weight, project, _ in self._projected:
            if weight.grad is not None:
                if self._outside:
                    weight.grad.sub_(weight, alpha=self._outside)
                project(weight.grad)
                if self._outside:
                    weight.grad.add_(weight, alpha=self._outside)
        super().modify_gradients(network)  # last: rows at rest have no weight decay that could be left out above

    @torch.no_grad()
    def finish(self, network: Network) -> None:
        if not self._exact:
            return
        for weight, project, before in self._projected:
            weight.sub_(before)
            project(weight)
            weight.add_(before)
