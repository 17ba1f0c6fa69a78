"""FedProTIP: projected local descent, and task identity from subspaces ("FedProTIP: Task-Agnostic Federated ...").

Clients project every step out of the subspaces of earlier tasks' layer inputs, and after each task send a basis of
their own; the server appends them. At test time a sample's relevance to each task's final-layer subspace says which
task it is of, and only that task's classes compete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.linalg.subspace import Projection, append_basis, core_basis, outside, sketch, span_of
from fcl_bench.linalg.task_identity import relevance, route
from fcl_bench.methods.gradient.projected import ProjectedClient, ProjectedMethod, ProjectedServer, bases_in
from fcl_bench.protocol.expected import Expectation, Expected, class_numbers, orthonormal, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.problem import Prediction, Problem, Shard, State, TestBatch
from fcl_bench.protocol.task import Task
from fcl_bench.randomness import derived_seed
from fcl_bench.training.heads import Heads
from fcl_bench.training.layer_inputs import HEADS
from fcl_bench.training.network import Network
from fcl_bench.training.objective import Objective

#: The stage in which clients send their reference vectors.
REFERENCES = "references"
#: `method.sketch`: as wide as the layer.
WHOLE = "layer"
#: Directions of an upload outside what is known that are shorter than this many roundings of its type are noise.
_ROUNDINGS = 8


@dataclass
class Tip:
    """`method.tip`: how a test sample's task is predicted.

    Args:
        route: sample (each on its own), batch (the paper: a whole batch, drawn from one task, at once).
        batch: samples per such batch.
        references: learnt (a task's reference is made when it is learnt; of later tasks' subspaces it has zeros),
            updated (4.4: clients keep the final-layer inputs that they sampled, and fill in the later entries).
        clients: how many clients make references ("a representative subset of clients", 4.4): of those with samples of
            the task, the first in an order that follows from the seed and is the same in all tasks; None: all.
    """

    route: str = knob("sample", choices=("sample", "batch"))
    batch: int = knob(64, least=1)
    references: str = knob("learnt", choices=("learnt", "updated"))
    clients: int | None = knob(None, least=1)


class ProjectedDescent(Objective):
    """Every update of a weight W stays orthogonal to its layer's protected inputs: (W_new - W_old) Phi = 0 (Eq. 4-5).

    Projected is what is applied: the gradient with weight decay in it, so that momentum adds up projected steps only
    (erratum 3); and at the end the whole update once more, since float32 rounds every step.

    Args:
        heads, over, rest: see `Objective`.
        projections: of parameters, by name.
        network: before the first step.
    """

    def __init__(
        self, heads: Heads, over: str, rest: bool, projections: dict[str, Projection], network: Network
    ) -> None:
        super().__init__(heads, over, rest)
        own = dict(network.named_parameters())
        self._projected = [(own[name], project, own[name].detach().clone()) for name, project in projections.items()]

    def direction(self, network: Network) -> None:
        super().direction(network)
        for weight, project, _ in self._projected:
            if weight.grad is not None:
                project(weight.grad)

    @torch.no_grad()
    def finish(self, network: Network) -> None:
        for weight, project, before in self._projected:
            weight.sub_(before)
            project(weight)
            weight.add_(before)


class FedProTIPClient(ProjectedClient):
    """Trains under projection; extracts bases and references."""

    method: FedProTIP
    #: A task, and its projections by parameter: the same for all clients and rounds of the task.
    _projections: tuple[int, dict[str, Projection]] = (0, {})

    def objective(self, shard: Shard, broadcast: Message, state: State) -> Objective:
        heads, method = Heads.from_message(broadcast), self.method
        if method.projection == "global":
            return Objective(heads, method.loss_over, method.frozen_heads)
        if self._projections[0] != shard.task:
            self._projections = shard.task, self._projections_of(broadcast)
        return ProjectedDescent(heads, method.loss_over, method.frozen_heads, self._projections[1], self.network)

    def _projections_of(self, broadcast: Message) -> dict[str, Projection]:
        """What keeps each weight that trains away from the bases of a broadcast."""
        own = dict(self.network.named_parameters())
        found = {}
        for name, layer in self.method.protected_weights(self.network).items():
            Phi = bases_in(broadcast, layer)
            if Phi is not None and own[name].requires_grad:
                found[name] = Projection(Phi, own[name])
        return found

    def answer(self, shard: Shard, broadcast: Message, state: State) -> tuple[Message, State]:
        """A basis or sketch for each layer; or, in the last stage, references.

        Where references are to be updated, the client keeps `inputs.<task>`: final-layer inputs (m_s, d) that it
        sampled under the model right after the task.
        """
        if broadcast.stage == REFERENCES:
            return self._references(shard, broadcast, state), state
        found = {}
        for layer, columns in self.columns_of(shard).items():
            if layer == HEADS and self.method.updates:
                state = {**state, f"inputs.{shard.task}": columns.T.float()}
            Phi = bases_in(broadcast, layer)
            known = columns[:, :0] if Phi is None else Phi.double()
            epsilon = self.method.epsilon(shard.task)
            U, sigma = core_basis(columns, known, epsilon, self.method.power, rounded_to=torch.float32)
            if self.method.sketch is None:
                found[layer] = U
            else:
                seed = derived_seed(self.problem.seed, f"sketch {layer}", shard.task, shard.client)
                width = self.method.sketch_width(len(U))
                found[layer] = sketch(U, sigma, width, torch.Generator().manual_seed(seed))
        told = dict.fromkeys(layer for layer, basis in found.items() if basis.shape[1])
        return Message(found, summed=found if self.method.sketch is not None else (), moments_of=told), state

    def _references(self, shard: Shard, broadcast: Message, state: State) -> Message:
        """Mean relevance of the client's samples to each task's final-layer subspace (Eq. 10).

        Of this task; or, with `updated`, of all tasks that the client has had samples of.
        """
        if not self.method.updates:
            features = self.trainer.features(self.network, shard.inputs)
            reference = relevance(features, head_bases(broadcast, shard.task, features)).mean(dim=0)
            return Message({"reference": reference}, sums_of={"reference": None})
        kept = {int(name.removeprefix("inputs.")): inputs for name, inputs in state.items()}
        own = dict(sorted(kept.items()))
        bases = head_bases(broadcast, shard.task, own[shard.task])
        rows = torch.stack([relevance(inputs, bases).mean(dim=0) for inputs in own.values()])
        # One row per task: this one's of the shard's samples, the others of what was kept.
        kept_of = [torch.full((len(own[task]),), row) for row, task in enumerate(own) if task != shard.task]
        now = torch.full((len(shard.labels),), list(own).index(shard.task))
        sums_of = {"references": torch.cat([now, *kept_of])}
        return Message({"references": rows, "tasks": torch.tensor(list(own), dtype=torch.int32)}, sums_of=sums_of)


def head_bases(broadcast: Message, task: int, features: torch.Tensor) -> list[torch.Tensor]:
    """U_0, ..., U_task of the final layer, whose inputs are `features` (n, d); no column where a task added none."""
    none = features.new_zeros(features.shape[1], 0)
    return [broadcast.get(f"basis.{t}.{HEADS}", none) for t in range(task + 1)]


class FedProTIPServer(ProjectedServer):
    """Appends bases (Eq. 9), keeps references, routes samples (Eq. 11)."""

    method: FedProTIP

    def __init__(self, method: FedProTIP, problem: Problem) -> None:
        super().__init__(method, problem)
        #: Per client and task, the reference (t + 1,).
        self._references: dict[tuple[int, int], torch.Tensor] = {}
        self._tolerance = _ROUNDINGS * torch.finfo(problem.wire.dtype).eps
        self.pure_batches = method.tip.batch if method.tip and method.tip.route == "batch" else None

    def model_rounds(self, task: Task) -> list[int]:
        """None with task prediction, which knows of a task only once its references are there."""
        return super().model_rounds(task) if self.method.tip is None else []

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        """Those who make references, in their stage (`tip.clients`); in others as any method."""
        tip = self.method.tip
        if tip is None or tip.clients is None or self.method.stages(task)[round_] != REFERENCES:
            return super().participants(task, round_, available)
        # An order of all clients rather than a draw per task: whoever can, votes on every task.
        order = sorted(available, key=lambda client: derived_seed(self.problem.seed, "voters", client))
        return sorted(order[: tip.clients])

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        if self.stage != REFERENCES:
            return super().extra_broadcast()
        # Only the final layer's bases are asked for now.
        return {name: basis for name, basis in super().extra_broadcast().items() if name.endswith(f".{HEADS}")}

    def expects_answer(self) -> Expectation:
        if self.stage != REFERENCES:
            return super().expects_answer()
        tasks = self.task + 1
        if self.method.updates:
            return {
                "references": real("tasks", tasks, least=0),
                "tasks": class_numbers("tasks", among=range(tasks), distinct=True),
            }
        return {"reference": real(tasks, least=0)}

    def expects_basis(self, layer: str, side: int) -> Expected:
        if self.method.sketch is not None:
            return real(side, self.method.sketch_width(side))
        return orthonormal(side, f"r of {layer}", widest=side)

    def absorb_answer(self, client: int, upload: Message) -> None:
        if self.stage == REFERENCES:
            if self.method.updates:
                for task, row in zip(upload["tasks"].tolist(), upload["references"].float(), strict=True):
                    self._references[client, task] = row
            else:
                self._references[client, self.task] = upload["reference"].float()
            return
        for layer, found in upload.items():
            found = found.double()
            if self.method.sketch is not None:
                self.received[layer] = self.received.get(layer, 0) + found
            else:
                before = self.received.get(layer, self.basis_before(layer, found))
                self.received[layer] = append_basis(before, found, self._tolerance)

    def new_basis(self, layer: str, received: torch.Tensor) -> torch.Tensor:
        before = self.basis_before(layer, received)
        if self.method.sketch is None:
            return received[:, before.shape[1] :]
        room = len(received) - before.shape[1]
        return span_of(outside(received, before), self._tolerance)[:, :room]

    def classify(self, batch: TestBatch) -> Prediction:
        features = self.embed(batch.inputs)
        logits = self.logits(features)
        scores = self.heads.class_scores(logits)
        if self.method.tip is None:
            return Prediction(scores)
        heads = None if self.heads.plain else logits.split(self.heads.sizes, dim=1)
        omega = relevance(features, self.bases[HEADS])
        if self.method.tip.route == "batch":
            if not batch.one_task:
                raise ValueError("method.tip.route=batch routes batches of one task, and this one may be mixed")
            omega = omega.mean(dim=0, keepdim=True)
        tasks = route(omega, *self.references())
        return Prediction(scores, tasks.expand(len(scores)), heads)

    def references(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, T, T) references, zero-padded, of the clients that ever sent one, and (K, T) which of them there are."""
        tasks = len(self.bases[HEADS])
        clients = sorted({client for client, _ in self._references})
        found = torch.zeros(len(clients), tasks, tasks, device=self.problem.device)
        known = torch.zeros(len(clients), tasks, dtype=torch.bool, device=self.problem.device)
        for (client, task), reference in self._references.items():
            row = clients.index(client)
            found[row, task, : len(reference)] = reference
            known[row, task] = True
        return found, known

    def model(self) -> dict[str, torch.Tensor]:
        return {**super().model(), **self._named_references()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**super().state_dict(), **self._named_references()}

    def _named_references(self) -> dict[str, torch.Tensor]:
        return {f"reference.{client}.{task}": value for (client, task), value in self._references.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        super().load_state_dict(state)
        for name, value in state.items():
            if name.startswith("reference."):
                _, client, task = name.split(".")
                self._references[int(client), int(task)] = value.to(self.problem.device)


@dataclass
class FedProTIP(ProjectedMethod):
    """Knobs of FedProTIP.

    Args:
        projection: local, of every step of a client; global, of the aggregated update alone: clients train freely, as
            in FOT (Fig. 5).
        tip: how the task is predicted (see `Tip`); None (`method.tip=false`): all classes compete, FedProTIP (-t).
        sketch: s_l, width of the Gaussian sketches that are sent in place of bases, so that a secure sum is all that
            the server sees (Eq. 40): a number, at most d_l of it used, or "layer" for d_l (Table 19); None: the bases.
    """

    name: ClassVar[str] = "fedprotip"
    client_half = FedProTIPClient
    server_half = FedProTIPServer

    projection: str = knob("local", choices=("local", "global"))
    tip: Tip | None = field(default_factory=Tip)
    sketch: int | str | None = knob(None, least=1, words="an integer of at least 1", choices=(WHOLE,))

    def sketch_width(self, side: int) -> int:
        """s_l of a layer with d_l = `side`, where sketches are sent."""
        return side if self.sketch == WHOLE else min(int(self.sketch), side)  # type: ignore[arg-type]

    @property
    def updates(self) -> bool:
        """Whether clients fill in the entries that later tasks add to their references."""
        return self.tip is not None and self.tip.references == "updated"

    def stages(self, task: Task) -> list[str]:
        return [*super().stages(task), *([REFERENCES] if self.tip else [])]

    def head_columns(self, task: Task) -> tuple[int, ...]:
        """With task prediction a full head per task, old classes included; without, one row a class (-t)."""
        return tuple(task.new_columns) if self.tip is None else task.columns
