"""The ledger: who sent how many bytes, in how many seconds, revealing what; and what that adds up to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.codec import RawSamples
from fcl_bench.protocol.message import Message

if TYPE_CHECKING:
    from fcl_bench.engine.reports import LabelCounts, Raw, Revealed, Seconds, StagesExchanged


def _stored_as(kind: type, default: Any = MISSING) -> Any:
    """A column of uploads.csv, with the NumPy type in which the ledger keeps it."""
    return field(default=default, metadata={"stored_as": kind})


@dataclass(frozen=True)
class Upload:
    """One exchange of one client: a row of uploads.csv. This is the one place that names its columns.

    Attributes:
        task, round, client: from 0.
        labelled: how many of them have a label.
        accepted: how many of the others got a label from the client itself.
        right: how many of those labels are true; `NOBODY_KNOWS` if the true labels are not available.
        up_bytes, down_bytes: payload.
        one_sample_sums, one_sample_moments: sums and moments in the upload of one sample only (see
            `engine.single_sample_leakage`).
        dropped: 1 if the upload was not as the server expected and was left out; else 0.
        lost: 1 if the client was asked and did not answer; else 0.
        late: 1 if its upload was to come in a later round; else 0.
    """

    task: int = _stored_as(np.int32)
    round: int = _stored_as(np.int32)
    client: int = _stored_as(np.int32)
    stage: str = _stored_as(np.int16)  # its number among the ledger's stages
    samples: int = _stored_as(np.int32)
    labelled: int = _stored_as(np.int32)
    accepted: int = _stored_as(np.int32)
    right: int = _stored_as(np.int32)
    up_bytes: int = _stored_as(np.int64)
    down_bytes: int = _stored_as(np.int64)
    client_seconds: float = _stored_as(np.float64)
    one_sample_sums: int = _stored_as(np.int32, default=0)
    one_sample_moments: int = _stored_as(np.int32, default=0)
    dropped: int = _stored_as(np.int8, default=0)
    lost: int = _stored_as(np.int8, default=0)
    late: int = _stored_as(np.int8, default=0)


#: Stands for a count that needs true labels, for clients whose samples have none available.
NOBODY_KNOWS = -1
#: The stored form of a row: 65 bytes.
_ROW = np.dtype([(column.name, column.metadata["stored_as"]) for column in fields(Upload)])
_STAGE, _RIGHT = (list(_ROW.names or ()).index(name) for name in ("stage", "right"))
#: The columns that `add_round` is given for each client, and those that may be left out.
_COUNTED = [column.name for column in fields(Upload) if column.name not in ("task", "round", "stage")]
_DEFAULTS = {column.name: column.default for column in fields(Upload) if column.default is not MISSING}
#: How many rows are converted to Python objects at a time, when they are read one by one.
_BLOCK = 4096
_ROWS, _SERVER_SECONDS, _REVEALED = (GROWING + name for name in ("uploads", "server_seconds", "revealed"))


class BroadcastCache:
    """Who keeps which tensors of broadcasts (see `Message.cached`)."""

    def __init__(self) -> None:
        self.names: dict[int, frozenset[str]] = {}
        #: The last broadcast, and its cost for a receiver that keeps these names: bytes, and its names afterwards.
        self._sent: Message | None = None
        self._costs: dict[frozenset[str], tuple[int, frozenset[str]]] = {}

    def send(self, receiver: int, broadcast: Message) -> int:
        """Bytes that `broadcast` costs this receiver, which has the tensors from now on."""
        if broadcast is not self._sent:
            self._sent, self._costs = broadcast, {}
            if self.names:
                # Of tensors that change again, such as weights of classes that come back, no receiver has the new ones.
                changing = broadcast.tensors.keys() - broadcast.cached
                left = {there: there.difference(changing) for there in set(self.names.values())}
                self.names = {receiver: left[there] for receiver, there in self.names.items()}
        if not broadcast.cached:
            return broadcast.nbytes
        there = self.names.get(receiver, frozenset())
        if there not in self._costs:
            # Most receivers keep the same names, so they share one set.
            self._costs[there] = broadcast.nbytes_without(there), there | frozenset(broadcast.cached)
        size, self.names[receiver] = self._costs[there]
        return size

    def state(self) -> dict[str, Any]:
        """Return it as JSON; receivers that keep the same share one list of names."""
        sets = list(dict.fromkeys(self.names.values()))
        number = {names: i for i, names in enumerate(sets)}
        return {
            "cached": [sorted(names) for names in sets],
            "cached_by": {str(receiver): number[names] for receiver, names in self.names.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        sets = [frozenset(names) for names in state["cached"]]
        self.names = {int(receiver): sets[number] for receiver, number in state["cached_by"].items()}


class Rows:
    """A table of numbers that grows at the end, with room to spare: adding a row costs the same at any length."""

    def __init__(self, dtype: np.dtype) -> None:
        self._room = np.zeros(0, dtype=dtype)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def array(self) -> np.ndarray:
        """(n,) the rows so far; a view, valid until the next `extend`."""
        return self._room[: self._used]

    def extend(self, rows: np.ndarray) -> None:
        """Add `rows` (m,) of the table's type."""
        needed = self._used + len(rows)
        if needed > len(self._room):
            # It grows by half, so that n rows are moved at most twice each on average, and at most a third is spare.
            room = np.zeros(max(needed, len(self._room) * 3 // 2), dtype=self._room.dtype)
            room[: self._used] = self.array
            self._room = room
        self._room[self._used : needed] = rows
        self._used = needed

    def tensor(self) -> torch.Tensor:
        """(n, bytes of a row) uint8: the rows as they lie in memory, without a copy."""
        return torch.from_numpy(self.array.view(np.uint8).reshape(self._used, self._room.dtype.itemsize))

    def restore(self, saved: torch.Tensor) -> None:
        rows = np.ascontiguousarray(saved.cpu().numpy()).view(self._room.dtype)
        self._room, self._used = rows.reshape(len(saved)).copy(), len(saved)


class RevealedSamples(Rows):
    """The distinct training samples that were revealed so far, in the order in which they were."""

    def __init__(self) -> None:
        super().__init__(np.dtype(np.int64))
        self._known = np.zeros(0, dtype=bool)

    def add(self, samples: np.ndarray) -> None:
        """Add revealed samples (m,): distinct indices among all training samples; some may have been added before."""
        if not len(samples):
            return
        if (missing := 1 + int(samples.max()) - len(self._known)) > 0:
            self._known = np.pad(self._known, (0, max(missing, len(self._known))))
        new = samples[~self._known[samples]]
        self._known[new] = True
        self.extend(new)

    def restore(self, saved: torch.Tensor) -> None:
        super().restore(saved)
        self._known = np.bincount(self.array) > 0


class Ledger:
    """All exchanges so far, the server's seconds per task, and the questions that tables ask of them.

    The exchanges are rows of numbers in order of their tasks, not objects: 10,000 clients and 1,000 tasks make ten
    million of them. A query about one task reads only that task's rows.

    Args:
        raw: the cost of sending a sample as it is; None if no samples are visible.
        in_order: whether tasks are entered one after the other; if not, each query looks at all rows.
    """

    def __init__(self, clients: int, raw: RawSamples | None = None, in_order: bool = True) -> None:
        self.clients, self._in_order = clients, in_order
        self.revealed = RevealedSamples()
        self._raw = raw
        self.server_seconds: list[float] = []
        self.cached = BroadcastCache()
        self._rows = Rows(_ROW)
        self._stages: list[str] = []

    @property
    def uploads(self) -> tuple[Upload, ...]:
        """The exchanges in order, as new objects: use it to look at a few, not in a loop over tasks."""
        return tuple(Upload(*row) for row in self.values())

    @property
    def rows(self) -> np.ndarray:
        """(n,) the exchanges in order, with `Upload`'s fields; the stage is a number."""
        return self._rows.array

    def values(self, unknown: Any = NOBODY_KNOWS) -> Iterator[tuple[Any, ...]]:
        """The exchanges in order, each as a tuple in the order of `Upload`'s fields; `unknown`: for `NOBODY_KNOWS`."""
        for begin in range(0, len(self.rows), _BLOCK):
            for stored in self.rows[begin : begin + _BLOCK].tolist():
                row = [*stored]
                row[_STAGE] = self._stages[row[_STAGE]]
                row[_RIGHT] = unknown if row[_RIGHT] == NOBODY_KNOWS else row[_RIGHT]
                yield tuple(row)

    def add_round(self, task: int, round_: int | np.ndarray, stage: str, columns: Mapping[str, Any]) -> None:
        """Enter the exchanges of one round, or of several of a stage.

        Args:
            task, round_, stage: of all of them; or (m,) the round of each.
            columns: `client` and the other fields of `Upload`, (m,) each, or one value for all.

        Raises:
            ValueError: `task` is before the last one entered.
        """
        if self._in_order and task + 1 < self._task_count:
            raise ValueError(f"task {task} after task {self._task_count - 1}: the ledger is kept in order")
        if stage not in self._stages:
            self._stages.append(stage)
        rows = np.empty(np.size(columns["client"]), dtype=_ROW)
        rows["task"], rows["round"], rows["stage"] = task, round_, self._stages.index(stage)
        for name in _COUNTED:
            rows[name] = columns[name] if name in columns else _DEFAULTS[name]
        self._rows.extend(rows)

    def rename_stages(self, stage: str) -> None:
        """Enter all exchanges so far under `stage`."""
        self.rows["stage"] = 0
        self._stages = [stage]

    def state(self) -> dict[str, Any]:
        """The state outside the rows, as JSON; clients that keep the same tensors share one list of names."""
        raw = None if self._raw is None else asdict(self._raw)
        return {"stages": self._stages, "raw": raw, **self.cached.state()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The rows, the seconds and the revealed samples, as tensors that only grow."""
        seconds = torch.tensor(self.server_seconds, dtype=torch.float64)
        return {_ROWS: self._rows.tensor(), _SERVER_SECONDS: seconds, _REVEALED: self.revealed.tensor()}

    def restore(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self._stages = list(state["stages"])
        self._raw = None if (raw := state["raw"]) is None else RawSamples(**raw)
        self.cached.restore(state)
        self._rows.restore(tensors[_ROWS])
        self.server_seconds = tensors[_SERVER_SECONDS].tolist()
        self.revealed.restore(tensors[_REVEALED])

    def task_totals(self, task: int) -> dict[str, float]:
        """Bytes up and down, client and server seconds of one task, summed over clients and rounds."""
        rows = self._of_task(task)
        totals = {name: rows[name].sum().item() for name in ("up_bytes", "down_bytes", "client_seconds")}
        return {**totals, "server_seconds": self.server_seconds[task]}

    def labels(self, task: int | None = None) -> LabelCounts:
        """Samples, labels, accepted pseudo-labels and right ones, of one task or of all; each client counts once."""
        totals: dict[str, int | None] = dict.fromkeys(("samples", "labelled", "accepted", "right"), 0)
        for rows in self._tasks() if task is None else (self._of_task(task),):
            first = rows[rows["round"] == 0]
            for name, total in totals.items():
                unknown = total is None or (first[name] == NOBODY_KNOWS).any()
                totals[name] = None if unknown else cast(int, total) + int(first[name].sum(dtype=np.int64))
        return cast("LabelCounts", totals)

    def dropped(self, task: int | None = None) -> list[tuple[int, int]]:
        """Client and round of each upload that was left out, in one task or in all."""
        rows = self.rows if task is None else self._of_task(task)
        return rows[["client", "round"]][rows["dropped"] > 0].tolist()

    def communication(self) -> StagesExchanged:
        """FedRAN 2.3: bytes per client and task, summed over rounds, then the maximum; and totals.

        `by_stage` splits them as FedProTIP's Table 9 does.
        """
        up_total = np.zeros(self.clients, dtype=np.int64)
        up_max = down_max = 0
        by_task = {stage: [0] * self._task_count for stage in sorted(self._stages)}
        for rows in self._tasks():
            up, down = self._per_client(rows, "up_bytes"), self._per_client(rows, "down_bytes")
            up_total += up
            up_max, down_max = max(up_max, int(up.max())), max(down_max, int(down.max()))
            for number in np.unique(rows["stage"]).tolist():
                sent = self._per_client(rows[rows["stage"] == number], "up_bytes")
                by_task[self._stages[number]][rows["task"][0]] = int(sent.max())
        return {
            "up_max_bytes": up_max,
            "up_total_max_bytes": int(up_total.max(initial=0)),
            "down_max_bytes": down_max,
            "up_total_bytes": self._total("up_bytes"),
            "down_total_bytes": self._total("down_bytes"),
            "raw": self._against_raw(),
            "by_stage": {
                stage: {
                    "up_max_bytes": max(most),
                    "up_max_bytes_by_task": most,
                    "up_total_bytes": self._total("up_bytes", stage),
                    "down_total_bytes": self._total("down_bytes", stage),
                }
                for stage, most in by_task.items()
            },
        }

    def _against_raw(self) -> Raw | None:
        """Compare each client's uploads of a task, over its rounds, with sending its samples of the task once."""
        raw = self._raw
        if raw is None:
            return None
        busiest, total, uploads, larger = (0, 0), 0, 0, 0
        for rows in self._tasks():
            up = self._per_client(rows, "up_bytes")
            samples = np.zeros((2, self.clients), dtype=np.int64)
            # The number is the same in every round that a client takes part in.
            for own, name in zip(samples, ("labelled", "accepted"), strict=True):
                np.maximum.at(own, rows["client"], rows[name])
            cost, sent = raw.cost(samples.sum(axis=0)), up > 0
            uploads, larger = uploads + int(sent.sum()), larger + int((up > cost).sum())
            total += int(cost[sent].sum())
            most = int(up.max())
            busiest = max(busiest, (most, int(cost[up == most].max())))
        return {
            "kind": raw.kind,
            "sample_bytes": raw.sample_bytes,
            "busiest_bytes": busiest[1],
            "total_bytes": total,
            "uploads": uploads,
            "larger": larger,
        }

    def single_samples(self) -> Revealed:
        """How much clients revealed about single samples."""
        return {
            "one_sample_sums": self._total("one_sample_sums"),
            "one_sample_moments": self._total("one_sample_moments"),
            "revealed_samples": len(self.revealed),
        }

    def _total(self, column: str, stage: str | None = None) -> int:
        """The sum of a column over all exchanges, or over those of a stage."""
        rows = self.rows
        values = rows[column] if stage is None else rows[column][rows["stage"] == self._stages.index(stage)]
        return int(values.sum(dtype=np.int64))

    def _per_client(self, rows: np.ndarray, column: str) -> np.ndarray:
        """(K,) sums of a column over each client's rows."""
        sums = np.zeros(self.clients, dtype=np.int64)
        np.add.at(sums, rows["client"], rows[column])
        return sums

    def runtime(self) -> Seconds:
        """`seconds_per_task` (FedRAN Eq. 1): mean over tasks of (mean over the K clients of client time + server's)."""
        client = sum(float(rows["client_seconds"].sum()) for rows in self._tasks())
        server = sum(self.server_seconds)
        tasks = max(len(self.server_seconds), 1)
        return {
            "seconds_per_task": (client / self.clients + server) / tasks,
            "client_seconds": client,
            "server_seconds": server,
        }

    def _of_task(self, task: int) -> np.ndarray:
        """The rows of one task."""
        # `.searchsorted` on the field of all rows would copy the column each time.
        rows = self.rows
        if not self._in_order:
            return rows[rows["task"] == task]
        first, end = (bisect_left(rows, number, key=lambda row: row["task"]) for number in (task, task + 1))
        return rows[first:end]

    def _tasks(self) -> Iterator[np.ndarray]:
        """The rows of each task that has any, in order."""
        return filter(len, map(self._of_task, range(self._task_count)))

    @property
    def _task_count(self) -> int:
        """How many tasks there were up to the last exchange."""
        tasks = self.rows["task"][-1:] if self._in_order else self.rows["task"]
        return 1 + int(tasks.max(initial=-1))
