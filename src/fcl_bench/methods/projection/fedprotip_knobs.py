"""The keys of `method.tip` and `method.head_rank`, which FedProTIP alone has."""

from __future__ import annotations

from dataclasses import dataclass

from fcl_bench.config import knob


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
        rule: means (Eq. 10-11: a reference is the mean over samples), batches (as in the public code: relevance is of a
            batch, the root of the mean square, in the subspaces of the second task and later ones; a client's
            similarity to a task is the mean over batches of its samples of the task; with two tasks, where cosines
            say nothing, the relevance's size decides).
    """

    route: str = knob("sample", choices=("sample", "batch"))
    batch: int = knob(64, least=1)
    references: str = knob("learnt", choices=("learnt", "updated"))
    clients: int | None = knob(None, least=1)
    rule: str = knob("means", choices=("means", "batches"))


@dataclass
class HeadRank:
    """`method.head_rank`: directions of the final layer's inputs, whatever the spectrum.

    Args:
        first: how many the first client adds in the first task.
        others: how many all others add together in the first task, and all clients together in every later task.
    """

    first: int = knob(30, least=1)
    others: int = knob(20, least=0)

    def of(self, task: int, first: bool, clients: int) -> int:
        """How many directions one of K `clients` adds; `first`: whether nobody has added any before it."""
        if task == 0:
            return self.first if first else self.others // (clients - 1)
        return self.others // clients
