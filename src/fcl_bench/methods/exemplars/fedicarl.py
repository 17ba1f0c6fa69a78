"""FediCaRL: iCaRL (Rebuffi et al., CVPR 2017) by federated averaging. Every client keeps exemplars of its own classes.

A round trains on the client's samples and all its exemplars, held to the model with which the last task ended; O are
the columns of earlier tasks, q the logits, q' the teacher's:

    ce_kd: CE(q, y) + strength * KD,   KD = -mean_x sum_{c in O} softmax(q'_O / T)_c log softmax(q_O / T)_c
    bce:   mean_x sum_c BCE(sigma(q_c), z_c),   z = one-hot y, but for c in O: (1 - strength) y_c + strength sigma(q'_c)

After a task's rounds, each client chooses its exemplars by herding under the final model, in the stage `exemplars`.
`classify: nme` names the class whose exemplars' mean is nearest; clients then send sums of their exemplars' features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, normalize, one_hot

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Samples
from fcl_bench.errors import UserError
from fcl_bench.methods.exemplars.memory import (
    EXEMPLARS,
    ExemplarClient,
    ExemplarMethod,
    ExemplarServer,
    lists_in,
    memory_size,
    random_order,
    recalled,
    remembered,
    storable,
    with_memory,
)
from fcl_bench.protocol.context import ClientData, Context, Prediction, State, Task, TestBatch
from fcl_bench.protocol.fields import SUMS, Schema, counts, numbers, real
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Distilled, Objective

#: The score of a class without a mean; two directions are at most 2 apart.
_FARTHEST = -3.0


class Binary(Objective):
    """A yes or no for every column, as in iCaRL: the teacher's for old columns, the label's for the task's."""

    def __init__(self, heads: Heads, rest: bool, teacher: Network | None, strength: float) -> None:
        super().__init__(heads, "seen", rest)
        self._teacher, self._strength = teacher, strength
        # A class that comes back is learnt from its labels.
        self._own = list(heads.task)

    def score_loss(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        targets = one_hot(labels, scores.shape[1]).to(scores.dtype)
        if self._teacher is not None:
            with torch.no_grad():
                wanted = self._teacher(inputs).to(scores.dtype).sigmoid()
            mixed = targets.clone()
            old = slice(wanted.shape[1])
            mixed[:, old] = (1 - self._strength) * targets[:, old] + self._strength * wanted
            mixed[:, self._own] = targets[:, self._own]
            targets = mixed
        return binary_cross_entropy_with_logits(scores, targets, reduction="sum") / len(scores)


class FediCaRLClient(ExemplarClient):
    """Keeps exemplars and trains on them beside its samples."""

    method: FediCaRL

    def samples(self, client_data: ClientData, broadcast: Message, state: State) -> Samples:
        stored = recalled(state)
        if stored is not None and self.method.published:
            seed = derived_seed(
                self.context.seed, "recall", client_data.task, int(broadcast["round"]), client_data.client
            )
            chosen = random_order(self.method.memory, len(stored[1]), seed).to(stored[1].device)
            stored = stored[0][chosen], stored[1][chosen]
        return with_memory(super().samples(client_data, broadcast, state), stored)

    def speaks_for(self, client_data: ClientData, state: State) -> int:
        """The client's samples and exemplars together."""
        return super().speaks_for(client_data, state) + min(self.method.memory, memory_size(state))

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        method = self.method
        heads, teacher = Heads.from_message(broadcast), self.teacher(client_data, broadcast)
        if method.loss == "bce":
            return Binary(heads, method.frozen_heads, teacher, method.strength)
        if teacher is None:
            return super().objective(client_data, broadcast, state)
        return Distilled(heads, method.loss_classes, method.frozen_heads, teacher, method.strength, method.temperature)

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """Choose the exemplars of the task's classes; with `nme`, the sums of all exemplars' features."""
        if self.method.published:
            return Message({}), remembered(state, client_data.inputs, client_data.labels, budget=None)

        state = self.with_exemplars(state, client_data.inputs, client_data.labels)
        return (self.sums(state, client_data) if self.method.classify == "nme" else Message({})), state

    def sums(self, state: State, client_data: ClientData) -> Message:
        """Return, for each class with exemplars, its column, their number, and the sum (d,) of their directions."""
        lists = {column: stored for column, stored in lists_in(state).items() if len(stored)}
        sums = [self.directions(stored).sum(dim=0) for stored in lists.values()]
        sizes = torch.tensor([len(stored) for stored in lists.values()], dtype=torch.int32)
        now, before = torch.full((len(client_data.labels),), -1), []
        for number, (column, stored) in enumerate(lists.items()):
            own = torch.nonzero(client_data.labels == column).squeeze(1)
            # The engine knows a lone exemplar by its place in the shard, if it is of this task.
            if len(stored) == 1 and len(own):
                own = own[(storable(client_data.inputs[own]) == stored).flatten(1).all(dim=1)][:1]
                now[own.cpu()] = number
            before += [number] * (len(stored) - int((now == number).sum()))
        return Message(
            {
                "classes": torch.tensor(list(lists), dtype=torch.int32),
                "counts": sizes,
                "sums": torch.stack(sums) if sums else torch.zeros(0, self.network.dimension, dtype=torch.float64),
            },
            groups={"sums": torch.cat([now, torch.tensor(before, dtype=torch.int64)])},
        )


class FediCaRLServer(ExemplarServer):
    """Averages models and, for `nme`, adds up the sums of the exemplars of all clients.

    Attributes:
        holders: for `nme`, the clients that have chosen exemplars so far; all of them are asked in every task.
        sums: (C, d) of the exemplars' directions under the last task's model.
        counts: (C,) how many exemplars there are.
    """

    method: FediCaRL
    state = ("holders", "sums", "counts")

    def __init__(self, method: FediCaRL, context: Context) -> None:
        super().__init__(method, context)
        self.holders: set[int] = set()
        self.sums = torch.zeros(0, self.network.dimension, dtype=torch.float64, device=context.device)
        self.counts = torch.zeros(0, dtype=torch.int64, device=context.device)

    def model_rounds(self, task: Task) -> list[int]:
        """No round with nearest means, since a class is known only once its exemplars are chosen."""
        return [] if self.method.classify == "nme" else super().model_rounds(task)

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        present = super().participants(task, round_, available)
        asks_all = self.method.classify == "nme" and self.method.stages(task)[round_] == EXEMPLARS
        return sorted({*present, *self.holders}) if asks_all else present

    def broadcast(self, task: Task, round_: int) -> Message:
        message = super().broadcast(task, round_)
        if self.stage != EXEMPLARS:
            return message
        self.sums = self.sums.new_zeros(task.columns_seen, self.sums.shape[1])
        self.counts = self.counts.new_zeros(task.columns_seen)
        # Clients that keep all their samples need no model.
        return Message(self.heads.to_message(), EXEMPLARS) if self.method.published else message

    def schema(self, task: Task, stage: str) -> Schema:
        found = super().schema(task, stage)
        if "classes" not in found:
            return found
        return {**found, "classes": replace(found["classes"], below=len(self.counts))}

    def absorb_answer(self, client: int, upload: Message) -> None:
        if "sums" in upload:
            self.holders.add(client)
            classes = upload["classes"].long()
            self.sums.index_add_(0, classes, upload["sums"].double())
            self.counts.index_add_(0, classes, upload["counts"].long())

    def finish_stage(self) -> None:
        without = int((self.counts == 0).sum())
        if self.method.classify == "nme" and without:
            self._notices.tell(
                "without",
                f"{self.method.name}: no client keeps an exemplar of {without} of {len(self.counts)} classes, which"
                " nme can't name (a larger method.memory)",
            )

    def classify(self, batch: TestBatch) -> Prediction:
        """With `nme`, minus the distance of phi / ||phi|| to each class's mean, which has length 1 too."""
        if self.method.classify != "nme":
            return super().classify(batch)
        directions = normalize(self.embed(batch.inputs).double(), dim=1)
        distances = torch.cdist(directions, self.means(), compute_mode="donot_use_mm_for_euclid_dist")
        return Prediction((-distances).masked_fill(self.counts == 0, _FARTHEST))

    def means(self) -> torch.Tensor:
        """(C, d) the normalised mean of each class's exemplars, zeros where there are none."""
        return normalize(self.sums, dim=1)

    def model(self) -> dict[str, torch.Tensor]:
        own = {"exemplar_means": self.means()} if self.method.classify == "nme" else {}
        return {**super().model(), **own}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        super().load_model(model, tasks)
        if self.method.classify == "nme":
            self.sums = model["exemplar_means"]
            self.counts = self.sums.any(dim=1).long()  # only a class without an exemplar has no direction


@dataclass
class FediCaRL(ExemplarMethod):
    name: ClassVar[str] = "fedicarl"
    search: ClassVar[Mapping[str, str]] = {"loss_classes": "", "classify": "softmax,nme"}
    client_half = FediCaRLClient
    server_half = FediCaRLServer

    memory: int = knob(300, least=0)
    loss: str = knob("ce_kd", choices=("ce_kd", "bce"))
    strength: float = knob(1.0, least=0)
    temperature: float = knob(2.0, above=0)
    classify: str = knob("nme", choices=("softmax", "nme"))
    variant: str = knob("working", choices=("working", "published"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "bce" and self.strength > 1:
            raise UserError(f"method.strength={self.strength:g}: with method.loss=bce it is a share", "0 to 1")
        if self.classify == "nme" and not self.memory:
            raise UserError("method.memory=0 leaves no mean for method.classify=nme", "method.classify=softmax")
        if self.classify == "nme" and self.ccvr != "none":
            raise UserError(f"method.ccvr={self.ccvr}: method.classify=nme uses no heads", "method.ccvr=none")
        if self.published:
            self.require_published(loss="ce_kd", classify="softmax", weighting="uniform")

    @property
    def keeps_teacher(self) -> bool:  # type: ignore[override]
        return self.strength > 0

    def uploads(self, context: Context) -> dict[str, Schema]:
        means = {
            "classes": numbers("classes", form="distinct", otherwise="method.classify=softmax"),
            "counts": counts("classes", speaks_for="run"),
            "sums": real("classes", "d", leaks=SUMS),
        }
        chosen = {EXEMPLARS: means if self.classify == "nme" else {}} if self.memory else {}
        return {**super().uploads(context), **chosen}

    def stages(self, task: Task) -> list[str]:
        return [*super().stages(task), *([EXEMPLARS] if self.memory else [])]
