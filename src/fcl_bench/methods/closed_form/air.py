"""AIR: analytic imbalance rectifier (Fang et al. 2024, arXiv 2408.10349), made federated; and logit adjustment.

STSA's least squares weigh every sample alike, so classes with few samples get small scores. There are two remedies.
Both use class counts that clients send:

- weights: a sample of class c counts pi_c = 1/n_c, so that every class has the same part in the loss:
  W = (sum_c pi_c G_c + gamma I)^-1 (pi_c B_c). Clients send their counts first, then weighted statistics.
- logits: STSA's scores minus tau log(n_c/N) (Menon et al., "Long-Tail Learning via Logit Adjustment", ICLR 2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.methods.closed_form.base import counted
from fcl_bench.methods.closed_form.stsa import STSA, STSAClient, STSAServer
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import SUM, Schema, counts
from fcl_bench.protocol.message import Message

#: The stage in which clients send the sizes of their classes.
COUNTS = "counts"


def weights(totals: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """pi (c,) = 1/n_c for class counts `totals` (c,); 1 where there is no sample to weigh."""
    return 1 / totals.clamp_min(1).to(like)


class AIRClient(STSAClient):
    """STSA's statistics, of weighted samples or with class counts."""

    method: AIR

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """With weights n (c_t), then G and C weighted by pi; with logits all three at once."""
        columns = broadcast["columns"]
        sizes = {"n": counted(client_data, columns)}
        if broadcast.stage == COUNTS:
            return Message(sizes), state
        upload, state = super().update(client_data, broadcast, state)
        if self.method.weighted:
            # `blocks` has multiplied the rows by one root of the weight; this is the other.
            roots = weights(broadcast["n"], upload["C"]).sqrt()
            return upload.with_tensors({**upload, "C": upload["C"] * roots}), state
        return upload.with_tensors({**upload, **sizes}), state

    def blocks(self, client_data: ClientData, broadcast: Message) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, with weights, the rows of H times the roots of their weights."""
        for H, which in super().blocks(client_data, broadcast):
            yield H * weights(broadcast["n"], H).sqrt()[which].unsqueeze(1) if self.method.weighted else H, which


class AIRServer(STSAServer):
    """Counts classes over clients and tasks, and solves as STSA does.

    Attributes:
        counts: (C,) int64, samples of each class so far.
        weight: the sum of the weights of all samples so far; only `gcv` asks for it.
    """

    method: AIR
    state: ClassVar[Sequence[str]] = ("counts", "weight")
    by_class = ("B", "counts")
    #: Each upload is weighed by counts as they were in its task.
    absorbs_late = False

    def __init__(self, method: AIR, context: Context) -> None:
        super().__init__(method, context)
        self.counts = torch.zeros(0, dtype=torch.int64, device=context.device)
        self.weight = 0.0
        #: Counts before the task at hand.
        self._before = self.counts

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self._before = self.counts.clone()

    def rounds(self, task: Task) -> int:
        """With weights, the counts come first."""
        return 2 if self.method.weighted else 1

    def broadcast(self, task: Task, round_: int) -> Message:
        """With weights, the task's columns; then n (c_t) over all clients and tasks so far, with what STSA sends."""
        message = super().broadcast(task, round_)
        if not self.method.weighted:
            return message
        if round_ == 0:
            return Message({"columns": message["columns"]}, COUNTS)
        return message.with_tensors({**message, "n": self.counts[self.columns].to(torch.int32)})

    def objection(self, upload: Message) -> str:
        if self.method.weighted and upload.stage != COUNTS:
            empty = self.counts[self.columns] == 0
            if bool(upload["C"][:, empty].any()):
                return "class sums are not zero, and by the counts there is no sample"
        return ""

    def absorb(self, client: int, upload: Message) -> None:
        if "n" in upload:
            self.counts[self.columns] += upload["n"].to(self.counts)
            self.samples += int(upload["n"].sum())
        if upload.stage != COUNTS:
            super().absorb(client, upload)

    def finish_task(self) -> None:
        self.weight += float(((self.counts - self._before) * weights(self.counts, self.B)).sum())
        super().finish_task()

    def choose_ridge(self) -> float:
        """With `normalise`, a number times the weights' mean over classes, so that it is as strong as in STSA."""
        ridge, method = super().choose_ridge(), self.method
        if isinstance(method.gamma, str) or not (method.weighted and method.normalise):
            return ridge
        held = self.counts[self.counts > 0]
        return ridge * float(weights(held, self.B).mean()) if len(held) else ridge

    def squares(self) -> float:
        return self.weight if self.method.weighted else super().squares()

    def intercept(self) -> torch.Tensor | None:
        """-tau log(n_c/N), and 0 for a class without a sample, whose scores are 0."""
        if self.method.weighted or self.method.tau == 0:
            return None
        shares = self.counts.clamp_min(1).to(self.B) / self.counts.sum().clamp_min(1)
        return -self.method.tau * torch.where(self.counts > 0, shares.log(), torch.zeros_like(shares))


@dataclass
class AIR(STSA):
    name: ClassVar[str] = "air"
    client_half = AIRClient
    server_half = AIRServer
    counts_samples = True

    correction: str = knob("weights", choices=("weights", "logits"))
    normalise: bool = True
    tau: float = knob(0.1, least=0, of="correction=logits")

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        statistics = super().uploads(context)["statistics"]
        C, n = statistics["C"], counts("c", combine=SUM)
        if self.weighted:
            # G is of rows times the root of their weight, and C has that root twice: C is no sum of these rows.
            return {COUNTS: {"n": n}, "statistics": {**statistics, "C": dataclasses.replace(C, of="")}}
        C = dataclasses.replace(C, by="n", zero_without="n")
        return {"statistics": {**statistics, "C": C, "n": n}}

    def paper_values(self, context: Context, classes: int) -> int:
        """STSA's and n."""
        return super().paper_values(context, classes) + classes

    @property
    def weighted(self) -> bool:
        return self.correction == "weights"
