"""FedProTIP: projected local descent, and task identity from subspaces ("FedProTIP: Task-Agnostic Federated ...").

Clients project every step out of the subspaces of earlier tasks' layer inputs, and after each task send a basis of
their own; the server appends them. At test time a sample's relevance to each task's final-layer subspace says which
task it is of, and only that task's classes compete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.linalg.spectral import Spectrum
from fcl_bench.methods.projection import task_identity
from fcl_bench.methods.projection.projected import (
    BASES,
    PART,
    ProjectedClient,
    ProjectedMethod,
    ProjectedServer,
    bases_in,
    basis_name,
)
from fcl_bench.methods.projection.subspace import Projection, append_basis, core_basis, outside, span_of
from fcl_bench.protocol.context import ClientData, Context, Prediction, State, Task, TestBatch
from fcl_bench.protocol.fields import MOMENTS, SUMS, Field, Schema, numbers, orthonormal, real
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.layer_inputs import HEADS
from fcl_bench.training.network import Heads

#: The stage in which clients send their reference vectors.
REFERENCES = "references"
#: `method.sketch`: as wide as the layer.
WHOLE = "layer"
#: Prefix of the name under which the server tells clients how many directions to add to the final layer's.
HEAD_RANK = "head_rank"
#: What works with secure sums.
_INSTEAD = "method=fot, which takes as many directions of a sum as hold a share of it"
#: A new direction of an upload is noise if it is shorter than this many roundings of the wire's type.
_ROUNDINGS = 8


class FedProTIPClient(ProjectedClient):
    """Trains under projection; extracts bases and references."""

    method: FedProTIP
    #: A task, and its projections by parameter: the same for all clients and rounds of the task.
    _projections: tuple[int, dict[str, Projection]] = (0, {})

    def projections(self, task: int, broadcast: Message) -> dict[str, Projection]:
        if self.method.projection == "global":
            return {}
        if self._projections[0] != task:
            own, found = dict(self.network.named_parameters()), {}
            reused = Heads.from_message(broadcast).reused
            for name, layer in self.method.protected_weights(self.network, reused).items():
                Phi = bases_in(broadcast, layer)
                if Phi is not None and own[name].requires_grad:
                    found[name] = Projection(Phi, own[name])
            self._projections = task, found
        return self._projections[1]

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """A basis or sketch for each layer; or, in the last stage, references.

        If references are updated, the client keeps `inputs.<task>`: final-layer inputs (m_s, d) that it
        sampled under the model right after the task.
        """
        if broadcast.stage == REFERENCES:
            return self._references(client_data, broadcast, state), state
        found: dict[str, torch.Tensor] = {}
        of_nothing: dict[str, torch.Tensor] = {}
        for layer, columns in self.columns_of(client_data).items():
            if layer == HEADS and self.method.updates:
                state = {**state, f"inputs.{client_data.task}": columns.T.float()}
            U, sigma = self._core(client_data.task, layer, columns, broadcast)
            if not U.shape[1]:  # a sketch of no direction has columns too, and tells nothing
                of_nothing[layer] = torch.full_like(client_data.labels, -1)
            found[layer] = U if self.method.sketch is None else self.sketched(client_data, layer, U * sigma)
        return Message(found, groups=of_nothing), state

    def _core(self, task: int, layer: str, columns: torch.Tensor, broadcast: Message) -> Spectrum:
        """The directions that a layer's columns (d, m) add, outside of what the server has."""
        method, Phi = self.method, bases_in(broadcast, layer)
        known = columns[:, :0] if Phi is None else Phi.double()
        if layer == HEADS and method.head_rank is not None:
            [rank] = [int(value) for name, value in broadcast.items() if name.startswith(f"{HEAD_RANK}.")]
            U, sigma = core_basis(columns, known, 1.0, rounded_to=torch.float32)
            return Spectrum(U[:, :rank], sigma[:rank])
        held = float((known.T @ columns).square().sum()) if method.share_of == "inputs" else 0.0
        # In the public code the very first client, which finds no basis, stops before the share is reached.
        below = method.variant == "published" and Phi is None
        return core_basis(columns, known, method.epsilon(task), method.power, torch.float32, held, below)

    def _references(self, client_data: ClientData, broadcast: Message, state: State) -> Message:
        """Mean relevance of the client's samples to each task's final-layer subspace (Eq. 10).

        It has this task's samples or, with `updated`, those of all tasks that the client has had samples of.
        """
        tip, task = self.method.tip, client_data.task
        assert tip is not None
        if self.method.updates:
            own = dict(sorted((int(name.removeprefix("inputs.")), inputs) for name, inputs in state.items()))
        else:
            own = {task: self.trainer.features(self.network, client_data.inputs)}
        bases = head_bases(broadcast, task, own[task])
        omegas = [task_identity.relevance(inputs, bases) for inputs in own.values()]
        by_batches = tip.rule == "batches"
        rows = [
            task_identity.batch_reference(omega, tip.batch) if by_batches else omega.mean(dim=0) for omega in omegas
        ]
        if not self.method.updates:
            return Message({"reference": rows[0]})
        # That of this task is of the shard's samples, the others are of what was stored.
        stored = [torch.full((len(own[of]),), row) for row, of in enumerate(own) if of != task]
        now = torch.full((len(client_data.labels),), list(own).index(task))
        upload = {"references": torch.stack(rows), "tasks": torch.tensor(list(own), dtype=torch.int32)}
        return Message(upload, groups={"references": torch.cat([now, *stored])})


def head_bases(named: Mapping[str, torch.Tensor], task: int, features: torch.Tensor) -> list[torch.Tensor]:
    """U_0, ..., U_task of the final layer, whose inputs are `features` (n, d); without columns if a task added none."""
    none = features.new_zeros(features.shape[1], 0)
    return [named.get(basis_name(t, HEADS), none) for t in range(task + 1)]


class FedProTIPServer(ProjectedServer):
    """Appends bases (Eq. 9), keeps references, routes samples (Eq. 11).

    Attributes:
        references: by "reference.<client>.<task>", a client's reference (t + 1,) of a task.
    """

    method: FedProTIP
    state = ("references",)

    def __init__(self, method: FedProTIP, context: Context) -> None:
        super().__init__(method, context)
        self._clients = context.clients or 0
        #: Whose turn it is in the stage of the bases, if clients take turns.
        self._turn = 0
        self.references: dict[str, torch.Tensor] = {}
        self._tolerance = _ROUNDINGS * torch.finfo(context.wire.dtype).eps
        self.pure_batches = method.tip.batch if method.tip and method.tip.route == "batch" else None

    def model_rounds(self, task: Task) -> list[int]:
        """No round with task prediction, which knows a task only once its references are there."""
        return super().model_rounds(task) if self.method.tip is None else []

    def stages(self, task: Task) -> list[str]:
        stages = super().stages(task)
        if self.method.extension == "union":
            return stages
        # Clients take turns; those without samples of the task, and those that fail, leave their round empty.
        at = stages.index(BASES)
        return [*stages[:at], *[BASES] * self._clients, *stages[at + 1 :]]

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        """One client in a round of `extension=sequential`; those who make references (`tip.clients`); else everyone."""
        stages, tip = self.stages(task), self.method.tip
        if stages[round_] == BASES and self.method.extension == "sequential":
            turn = stages[:round_].count(BASES)
            return [turn] if turn in available else []
        if tip is None or tip.clients is None or stages[round_] != REFERENCES:
            return super().participants(task, round_, available)
        # One order of all clients rather than a draw per task, so that the same clients vote on every task if they can.
        order = sorted(available, key=lambda client: derived_seed(self.context.seed, "voters", client))
        return sorted(order[: tip.clients])

    def broadcast(self, task: Task, round_: int) -> Message:
        self._turn = self.stages(task)[:round_].count(BASES)
        return super().broadcast(task, round_)

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        """All bases; in the last stage those of the final layer; while a task's grow, under names of their own."""
        extra = super().extra_broadcast()
        if self.stage == REFERENCES:
            return {name: basis for name, basis in extra.items() if name.endswith(f".{HEADS}")}
        if self.stage != BASES:
            return extra
        growing, part = f"basis.{self.task}.", f"{PART}{self._turn}.{self.task}."
        extra = {part + name.removeprefix(growing) if name.startswith(growing) else name: extra[name] for name in extra}
        if self.method.head_rank is not None and HEADS in self.widths():
            first = not any(self.ranks(HEADS))  # whoever failed before it added none
            rank = self.method.head_rank.of(self.task, first, self._clients)
            extra[f"{HEAD_RANK}.{self.task}.{self._turn}"] = torch.tensor(rank)
        return extra

    def schema(self, task: Task, stage: str) -> Schema:
        found = dict(super().schema(task, stage))
        if stage == BASES and self.method.sketch is None:
            for layer, declared in found.items():
                side = int(declared.shape[0])
                found[layer] = replace(declared, shape=(side, f"r of {layer}"), widest=side)
        if stage == REFERENCES:
            tasks = task.index + 1
            found = {name: declared.sized({"tasks": tasks}) for name, declared in found.items()}
            if "tasks" in found:
                found["tasks"] = replace(found["tasks"], below=tasks)
        return found

    def absorb_answer(self, client: int, upload: Message) -> None:
        if self.stage == REFERENCES:
            updated = self.method.updates
            tasks = upload["tasks"].tolist() if updated else [self.task]
            rows = upload["references"] if updated else upload["reference"].unsqueeze(0)
            for task, row in zip(tasks, rows.float(), strict=True):
                self.references[f"reference.{client}.{task}"] = row
            return
        for layer, found in upload.items():
            found = found.double()
            if self.method.sketch is not None:
                self.received[layer] = self.received.get(layer, 0) + found
            else:
                before = self.received.get(layer, self.known(layer))
                self.received[layer] = append_basis(before, found, self._tolerance)

    def new_basis(self, layer: str, received: torch.Tensor) -> torch.Tensor:
        before = self.known(layer)
        if self.method.sketch is None:
            return received[:, before.shape[1] :]
        room = len(received) - before.shape[1]
        return span_of(outside(received, before), self._tolerance)[:, :room]

    def classify(self, batch: TestBatch) -> Prediction:
        features = self.embed(batch.inputs)
        logits = self.logits(features)
        scores, tip = self.heads.class_scores(logits), self.method.tip
        if tip is None:
            return Prediction(scores)
        heads = None if self.heads.plain else logits.split(self.heads.sizes, dim=1)
        omega = task_identity.relevance(features, head_bases(self.bases, len(self.tasks) - 1, features))
        if tip.route == "batch":
            if not batch.one_task:
                raise ValueError("method.tip.route=batch routes batches of one task, and this one may be mixed")
            omega = task_identity.batch_relevance(omega) if tip.rule == "batches" else omega.mean(dim=0, keepdim=True)
        tasks = (task_identity.route_by_batches if tip.rule == "batches" else task_identity.route)(omega, *self.votes())
        return Prediction(scores, tasks.expand(len(scores)), heads)

    def votes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, T, T) references, zero-padded, of the clients that ever sent one, and (K, T) which of them exist."""
        known_of = {name: [int(number) for number in name.split(".")[1:]] for name in self.references}
        clients, tasks = sorted({client for client, _ in known_of.values()}), len(self.tasks)
        found = torch.zeros(len(clients), tasks, tasks, device=self.context.device)
        known = torch.zeros(len(clients), tasks, dtype=torch.bool, device=self.context.device)
        for name, (client, task) in known_of.items():
            row, reference = clients.index(client), self.references[name]
            found[row, task, : len(reference)] = reference
            known[row, task] = True
        return found, known

    def model(self) -> dict[str, torch.Tensor]:
        return {**super().model(), **self.references}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        super().load_model(model, tasks)
        self.references = {name: value for name, value in model.items() if name.startswith("reference.")}


@dataclass
class FedProTIP(ProjectedMethod):
    name: ClassVar[str] = "fedprotip"
    common_tasks: ClassVar[bool] = True
    search: ClassVar[Mapping[str, str]] = {"threshold": "uniform(0.4,0.9)"}
    client_half = FedProTIPClient
    server_half = FedProTIPServer

    projection: str = knob("local", choices=("local", "global"))
    projected_decay: bool = True  # type: ignore[misc]  # a constant of other methods
    extension: str = knob("union", choices=("union", "sequential"))
    head_rank: task_identity.HeadRank | None = None
    tip: task_identity.Tip | None = field(default_factory=task_identity.Tip)
    sketch: int | str | None = knob(None, least=1, words="an integer of at least 1", choices=(WHOLE,))

    @property
    def basis(self) -> Field:
        if self.sketch is None:
            return orthonormal("d_l", "r", leaks=MOMENTS, otherwise=_INSTEAD)
        # Sketches add up, but the rounding of masked numbers would count as directions.
        return real(leaks=MOMENTS, otherwise=_INSTEAD)

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages = super().uploads(context)
        if self.updates:
            updated = {"references": real("k", "tasks", least=0, leaks=SUMS), "tasks": numbers("k", form="distinct")}
            return {**stages, REFERENCES: updated}
        return {**stages, **({REFERENCES: {"reference": real("tasks", least=0, leaks=SUMS)}} if self.tip else {})}

    def sketch_width(self, side: int) -> int:
        """s_l; of bases, the most columns that there can be."""
        return min(self.sketch, side) if isinstance(self.sketch, int) else side

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extension == "union" and self.head_rank is not None:
            raise UserError("method.head_rank: each client's share, one after the other", "method.extension=sequential")
        if self.extension == "sequential" and self.sketch is not None:
            raise UserError(f"method.sketch={self.sketch}: of a sum over clients", "method.extension=union")
        if self.tip is not None and self.tip.rule == "batches" and not self.updates:
            raise UserError(
                "method.tip.references=learnt: method.tip.rule=batches compares what later tasks' subspaces hold",
                "method.tip.references=updated",
            )

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        clients, rank = context.clients or 1, self.head_rank
        if rank is not None and self.watches_heads(context.recurring) and 0 < rank.others < clients:
            raise UserError(
                f"method.head_rank.others={rank.others} leaves no direction to each of {clients} clients",
                f"method.head_rank.others={clients} or more, or method.head_rank=null",
            )
        if self.projects_average:
            return
        for key, fine in (("server_optimizer", ["average"]), ("aggregate", ["mean", "krum"])):
            if (value := getattr(self.training, key)) not in fine:
                raise UserError(
                    f"method.training.{key}={value} moves weights within earlier tasks' bases, since with"
                    " method.projected_decay=false only clients project",
                    f"method.training.{key}={' or '.join(fine)}, or method.projected_decay=true",
                )

    def projects_heads(self, recurring: bool) -> bool:
        # With task prediction every task has a full head, and no earlier one is used again.
        return super().projects_heads(recurring and self.tip is None)

    def watches_heads(self, recurring: bool) -> bool:
        return self.projects_heads(recurring) or self.tip is not None

    @property
    def projects_average(self) -> bool:
        return self.projected_decay or self.projection == "global"

    @property
    def updates(self) -> bool:
        """Whether clients fill in the entries that later tasks add to their references."""
        return self.tip is not None and self.tip.references == "updated"

    def stages(self, task: Task) -> list[str]:
        return [*super().stages(task), *([REFERENCES] if self.tip else [])]

    def head_columns(self, task: Task) -> tuple[int, ...]:
        """With task prediction each task has a full head, old classes included. Without it, each class has one row."""
        return tuple(task.new_columns) if self.tip is None else task.columns
