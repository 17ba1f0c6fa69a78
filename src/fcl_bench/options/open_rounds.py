"""`transport.rounds=open`: clients send the uploads of their tasks in any order, and each counts exactly once.

It is for methods whose server only adds uploads up. A step of the loop, which otherwise is a task, is a part of the
uploads here, as large as the others, whichever clients and tasks they are of; and a round is a single upload. After a
step the model is tested on the tasks up to the step's number, and all classes of the stream compete.

An upload's id is its client and its task. Which ids are in is saved together with the sums that they are in, so that no
interruption makes an upload count twice, or not at all.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from fcl_bench.config import Settings
from fcl_bench.engine.blob import packed
from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.exchange import ARRIVES, DROPPED, Exchange, Held, Reply, Round, Step, Table, Turn, largest_reply
from fcl_bench.engine.ledger import Ledger, Rows
from fcl_bench.engine.loop import Federation, participants_of
from fcl_bench.engine.missing import MissingClients
from fcl_bench.engine.transport import OPEN_ROUNDS
from fcl_bench.engine.validation import OptionStep
from fcl_bench.errors import UserError
from fcl_bench.options.withdrawal import require_sums
from fcl_bench.protocol.context import Context, Task
from fcl_bench.randomness import generator
from fcl_bench.tracking.console import Notices

log = logging.getLogger(__name__)

KEY = f"transport.rounds={OPEN_ROUNDS}"
#: What became of what arrived: it is in the sums; it was not as the server expects; its id was in already, with the
#: same content or with another.
FATES = ("absorbed", "dropped", "repeated", "refused")
_NEW = 2  # of them are of uploads whose id was not in
#: A row of arrivals.csv, in which `step` is the part of the uploads that was under way.
_ROW = np.dtype([("step", "i4"), ("client", "i4"), ("task", "i4"), ("fate", "i1"), ("checksum", "u4")])
_ROWS = GROWING + "arrivals"


def check(settings: Settings, context: Context, task: Task) -> None:
    """Raise a `UserError` for what does not go with open rounds; `task` may be any one."""
    require_sums(settings.method, context, task, KEY)
    scalars, faults = settings.scalars, settings.faults
    audited = settings.method.audits(context) or scalars.drift
    robust = scalars.robust_groups or scalars.client_share < 1
    for wrong, what, remedy in (
        (faults.fails, f"faults={faults.name} is of rounds with all clients", "faults=none"),
        (robust, "no round has all uploads, of which to take a robust sum", "robust_groups=0 client_share=1"),
        (audited, "audits look at whole tasks", "drift=0, method.bounds=false and method.theory=0"),
    ):
        if wrong:
            raise UserError(f"{KEY}: {what}", remedy)


def arrival_order(pairs: np.ndarray, seed: int, order: str | None) -> list[tuple[int, int]]:
    """Pairs (n, 2) of client and task in the order in which their uploads come in a simulation, each order as likely.

    Args:
        order: "own": only those in which each client's tasks ascend; None: all.
    """
    drawn = pairs[generator(seed, "arrivals").permutation(len(pairs))]
    if order == "own":
        ascending = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        places, drawn = np.argsort(drawn[:, 0], kind="stable"), np.empty_like(drawn)
        drawn[places] = ascending
    return [(client, task) for client, task in drawn.tolist()]


class Arrivals(Step):
    """Takes each upload once, by its client and task, and notes all that arrived."""

    def __init__(self) -> None:
        self._rows, self._notices = Rows(_ROW), Notices(log)
        #: Of each id that is in, the checksum of its upload.
        self._known: dict[tuple[int, int], int] = {}
        self.step = 0  # under way

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, pair: tuple[int, int]) -> bool:
        return pair in self._known

    def passed(self, round_: Round, turns: Iterator[Turn]) -> Iterator[Turn]:
        for turn in turns:
            if turn.fate != ARRIVES or turn.reply is None:
                yield turn
                continue
            pair = turn.client, round_.task.index
            checksum = zlib.crc32(packed(turn.reply.upload))
            if pair in self._known:  # it is not counted, nor absorbed
                alike = self._known[pair] == checksum
                which = f"client {pair[0]}'s upload of task {pair[1]} came again"
                text = which if alike else f"{which} with another content, and only the first counts"
                self._notices.tell(text, text, logging.INFO if alike else logging.WARNING)
                self._note(pair, "repeated" if alike else "refused", checksum)
                continue
            yield turn
            self._note(pair, "dropped" if turn.fate == DROPPED else "absorbed", checksum)
            self._known[pair] = checksum
            del turn

    def _note(self, pair: tuple[int, int], fate: str, checksum: int) -> None:
        self._rows.extend(np.array([(self.step, *pair, FATES.index(fate), checksum)], dtype=_ROW))

    def report(self) -> Mapping[str, Any]:
        """How many of each fate; and how many ids were in at the end of each step."""
        steps, fates = self._rows.array["step"], self._rows.array["fate"]
        counted = dict(zip(FATES, np.bincount(fates, minlength=len(FATES)).tolist(), strict=True))
        return {"arrivals": counted, "in_after": np.cumsum(np.bincount(steps[fates < _NEW])).tolist()}

    def tables(self) -> Mapping[str, Table]:
        """arrivals.csv: a row for each upload that arrived."""
        rows = ((step, client, task, FATES[fate], crc) for step, client, task, fate, crc in self._rows.array.tolist())
        return {"arrivals.csv": (list(_ROW.names or ()), rows)}

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {}, {_ROWS: self._rows.tensor()}

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._rows.restore(tensors[_ROWS])
        new = self._rows.array[self._rows.array["fate"] < _NEW]
        pairs = zip(new["client"].tolist(), new["task"].tolist(), strict=True)
        self._known = dict(zip(pairs, new["checksum"].tolist(), strict=True))


class OpenFederation(Federation):
    """A federation whose steps take what comes, until a part of all uploads is in.

    Args:
        order: see `arrival_order`.
        given: of a `Federation`, whose transport has `arrivals`.
    """

    def __init__(self, *given: Any, order: str | None = None, **named: Any) -> None:
        self.arrivals, self._order = Arrivals(), order
        #: Of each task its only round, made before the first upload of any.
        self._rounds: list[Round] = []
        super().__init__(*given, **named)
        self.state.ledger = Ledger(self.transport.clients, self.transport.raw, in_order=False)
        self._resumes_within_tasks = True

    def _composed(
        self, steps: Sequence[OptionStep], drops: bool, minimum: float | None
    ) -> tuple[MissingClients | None, Exchange]:
        missing, exchange = super()._composed(steps, drops, minimum)
        return missing, Exchange(self.transport, [self.arrivals, *exchange.steps])

    @cached_property
    def _pending(self) -> list[tuple[int, int]]:
        """Client and task of each upload that is not in; a simulation takes them in this order."""
        found = list[tuple[int, int]]()
        for task in self.stream.tasks:
            labelled = np.flatnonzero(self.transport.samples(task.index)[1]).tolist()
            named = self.server.participants(task, 0, labelled)
            found += [(client, task.index) for client in participants_of(self.server, named, self.transport.clients)]
        drawn = arrival_order(np.array(found).reshape(-1, 2), self.context.seed, self._order)
        return [pair for pair in drawn if pair not in self.arrivals]

    @cached_property
    def _ends(self) -> list[int]:
        """How many uploads are to be in after each step."""
        whole, steps = len(self.arrivals) + len(self._pending), len(self.stream.tasks)
        return [-(-whole * step // steps) for step in range(1, steps + 1)]

    @cached_property
    def _replies(self) -> Iterator[Reply]:
        """What comes from now on."""
        return cast(Any, self.transport).arrivals(self._pending, lambda task: self._rounds[task].broadcast)

    def _rounds_in(self, task: Task) -> int:
        return self._ends[task.index] - [0, *self._ends][task.index]

    def _start(self, task: Task) -> int:
        """The uploads of the step are its rounds: those of it that are in, and those that it still takes."""
        tasks, self.arrivals.step = self.stream.tasks, task.index
        if not self._rounds:
            with self._watch.running():  # the server makes room for all classes, which a resumed one has
                for each in tasks[-1:] if len(self.arrivals) else tasks:
                    self.server.start_task(each)
            self._rounds = [self._asked(each, 0, self._held(each)) for each in tasks]
            self.transport.most = max(map(largest_reply, self._rounds))
        return self.state.rounds_done + max(self._ends[task.index] - len(self.arrivals), 0)

    def _round(self, task: Task, number: int, held: Held) -> None:
        """The next upload, whichever client and task it is of."""
        before = len(self.arrivals)
        while len(self.arrivals) == before:  # what comes again is no upload
            reply = next(self._replies)
            round_ = self._rounds[reply.upload.task]
            for client, upload in self.exchange.passed(round_, iter([reply])):
                with self._watch.running():
                    self.server.absorb_late(client, upload, round_.task)
        own = {name: column[[reply.client]] for name, column in round_.columns.items()}
        self.state.ledger.add_round(round_.task.index, 0, round_.broadcast.stage, own)

    def _evaluate(self, task: Task) -> None:
        super()._evaluate(replace(task, columns_seen=self.stream.tasks[-1].columns_seen))

    def _look_for_gates(self, task: Task) -> None:
        """Only at the end: before it, a task may have no upload yet."""
        if task.index == len(self.stream.tasks) - 1:
            super()._look_for_gates(task)
