"""The exchanges of a run as rows of numbers: who sent how many bytes, in how many seconds, revealing what."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch

from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.protocol.context import WireFormat, column_bytes
from fcl_bench.protocol.message import Message

#: Of a label on the wire, an int32.
_LABEL = 4


@dataclass(frozen=True)
class RawSamples:
    """The cost of sending samples as they are, as `centralised_ridge` and `centralised` do.

    Attributes:
        kind: "features", or "images" for methods that train the network.
        sample_bytes: bytes of a sample with its label.
        upload_bytes: additional bytes of every upload: the scales of a 16-bit wire type.
    """

    kind: str
    sample_bytes: int
    upload_bytes: int = 0

    @classmethod
    def of(cls, inputs: torch.Tensor, wire: WireFormat) -> RawSamples:
        """The cost of samples like `inputs` (n, ...): images travel as bytes, features in the wire's type."""
        numbers = int(np.prod(inputs.shape[1:]))
        if inputs.dtype == torch.uint8:
            return cls("images", numbers + _LABEL)
        scales = numbers * column_bytes(0, wire.dtype)
        return cls("features", numbers * column_bytes(1, wire.dtype) - scales + _LABEL, scales)

    def cost(self, samples: np.ndarray) -> np.ndarray:
        """Bytes for these numbers of samples; 0 for no samples."""
        return samples * self.sample_bytes + np.where(samples > 0, self.upload_bytes, 0)


def _stored_as(kind: type, default: Any = MISSING) -> Any:
    """A column of uploads.csv, with the NumPy type in which the ledger keeps it."""
    return field(default=default, metadata={"stored_as": kind})


@dataclass(frozen=True)
class Upload:
    """One exchange of one client: a row of uploads.csv. This is the one place that names its columns.

    Attributes:
        task, round, client: from 0.
        stage: what the exchange was for.
        samples: number of the client's samples of the task.
        labelled: how many of them have a label.
        accepted: how many of the others got a label from the client itself.
        right: how many of those labels are true; `NOBODY_KNOWS` if the true labels are not available.
        up_bytes, down_bytes: payload.
        client_seconds: the client's own computing time.
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
#: The columns that `add_round` is given for each client, and those that may be left out.
_COUNTED = [column.name for column in fields(Upload) if column.name not in ("task", "round", "stage")]
_DEFAULTS = {column.name: column.default for column in fields(Upload) if column.default is not MISSING}
#: How many rows are converted to Python objects at a time, when they are read one by one.
_BLOCK = 4096
_ROWS, _SERVER_SECONDS, _REVEALED = (GROWING + name for name in ("uploads", "server_seconds", "revealed"))


class BroadcastCache:
    """Who keeps which tensors of broadcasts (see `Message.cached`).

    Attributes:
        names: per receiver, the names of the tensors that it keeps. Receivers that keep the same share one set.
    """

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
                self._forget(broadcast.tensors.keys() - broadcast.cached)
        if not broadcast.cached:
            return broadcast.nbytes
        there = self.names.get(receiver, frozenset())
        if there not in self._costs:
            # Most receivers keep the same names, so they share one set.
            self._costs[there] = broadcast.nbytes_without(there), there | frozenset(broadcast.cached)
        size, self.names[receiver] = self._costs[there]
        return size

    def _forget(self, changing: Collection[str]) -> None:
        """Forget tensors that change again, such as weights of classes that come back: no receiver has the new ones."""
        left = {there: there.difference(changing) for there in set(self.names.values())}
        self.names = {receiver: left[there] for receiver, there in self.names.items()}

    def state(self) -> dict[str, Any]:
        """Return it as JSON; receivers that keep the same share one list of names."""
        sets = list(dict.fromkeys(self.names.values()))
        number = {names: i for i, names in enumerate(sets)}
        return {
            "cached": [sorted(names) for names in sets],
            "cached_by": {str(receiver): number[names] for receiver, names in self.names.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        sets = [frozenset(names) for names in state["cached"]]
        self.names = {int(receiver): sets[number] for receiver, number in state["cached_by"].items()}


class Rows:
    """A table of numbers that grows at the end, with room to spare, so that adding a row costs the same at any length.

    Args:
        dtype: NumPy's type of a row; its fields are the columns.
    """

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
        """Take over what `tensor` returned."""
        rows = np.ascontiguousarray(saved.cpu().numpy()).view(self._room.dtype)
        self._room, self._used = rows.reshape(len(saved)).copy(), len(saved)


class RevealedSamples:
    """The distinct training samples that were revealed so far, in the order in which they were."""

    def __init__(self) -> None:
        self._rows = Rows(np.dtype(np.int64))
        self._known = np.zeros(0, dtype=bool)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, samples: np.ndarray) -> None:
        """Add revealed samples (m,): distinct indices among all training samples; some may have been added before."""
        if not len(samples):
            return
        if (missing := 1 + int(samples.max()) - len(self._known)) > 0:
            self._known = np.pad(self._known, (0, max(missing, len(self._known))))
        new = samples[~self._known[samples]]
        self._known[new] = True
        self._rows.extend(new)

    def tensors(self) -> dict[str, torch.Tensor]:
        """A tensor that only grows."""
        return {_REVEALED: self._rows.tensor()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `tensors` returned."""
        saved = Rows(np.dtype(np.int64))
        saved.restore(tensors[_REVEALED])
        self._rows, self._known = Rows(np.dtype(np.int64)), np.zeros(0, dtype=bool)
        self.add(saved.array)


class Exchanges:
    """All exchanges so far and the server's seconds per task.

    The exchanges are rows of numbers in order of their tasks, not objects: 10,000 clients and 1,000 tasks make ten
    million of them. A query about one task reads only that task's rows.

    Args:
        clients: K.
        raw: the cost of sending a sample as it is; None if no samples are visible.

    Attributes:
        server_seconds: the server's seconds for each complete task.
        revealed: the samples that were revealed.
    """

    def __init__(self, clients: int, raw: RawSamples | None = None) -> None:
        self.clients = clients
        self.revealed = RevealedSamples()
        self._raw = raw
        self.server_seconds: list[float] = []
        self._cached = BroadcastCache()
        self._rows = Rows(_ROW)
        self._stages: list[str] = []

    @property
    def uploads(self) -> tuple[Upload, ...]:
        """The exchanges in order, as new objects: use it to look at a few, not in a loop over tasks."""
        return tuple(Upload(*row) for row in self.values())

    def __len__(self) -> int:
        """How many exchanges there were."""
        return len(self._rows)

    def values(self) -> Iterator[tuple[Any, ...]]:
        """The exchanges in order as plain tuples, in the order of `Upload`'s fields."""
        stage = [field.name for field in fields(Upload)].index("stage")
        for begin in range(0, len(self), _BLOCK):
            for row in self._rows.array[begin : begin + _BLOCK].tolist():
                yield *row[:stage], self._stages[row[stage]], *row[stage + 1 :]

    def cells(self) -> Iterator[Sequence[Any]]:
        """The rows of uploads.csv: `values`, with empty cells for unknown ones."""
        if not (self._rows.array["right"] == NOBODY_KNOWS).any():
            yield from self.values()
            return
        right = [field.name for field in fields(Upload)].index("right")
        for row in self.values():
            yield (*row[:right], "", *row[right + 1 :]) if row[right] == NOBODY_KNOWS else row

    def add_round(self, task: int, round_: int, stage: str, columns: Mapping[str, Any]) -> None:
        """Enter the exchanges of one round.

        Args:
            task, round_, stage: of all of them.
            columns: `client` and the other fields of `Upload`, (m,) each, or one value for all.

        Raises:
            ValueError: `task` is before the last one entered.
        """
        before = self._rows.array["task"]
        if before.size and task < before[-1]:
            raise ValueError(f"task {task} after task {before[-1]}: the ledger is kept in order")
        if stage not in self._stages:
            self._stages.append(stage)
        rows = np.empty(np.size(columns["client"]), dtype=_ROW)
        rows["task"], rows["round"], rows["stage"] = task, round_, self._stages.index(stage)
        for name in _COUNTED:
            rows[name] = columns[name] if name in columns else _DEFAULTS[name]
        self._rows.extend(rows)

    def rename_stages(self, stage: str) -> None:
        """Enter all exchanges so far under `stage`."""
        self._rows.array["stage"] = 0
        self._stages = [stage]

    def send(self, client: int, broadcast: Message) -> int:
        """Bytes that `broadcast` costs this client, which has the tensors from now on."""
        return self._cached.send(client, broadcast)

    @property
    def cached(self) -> dict[int, frozenset[str]]:
        """Return, per client, the names of the broadcast tensors that it keeps (see `Message.cached`)."""
        return self._cached.names

    def state(self) -> dict[str, Any]:
        """The state outside the rows, as JSON; clients that keep the same tensors share one list of names."""
        raw = None if self._raw is None else asdict(self._raw)
        return {"stages": self._stages, "raw": raw, **self._cached.state()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The rows, and the seconds, as tensors that only grow."""
        seconds = torch.tensor(self.server_seconds, dtype=torch.float64)
        return {_ROWS: self._rows.tensor(), _SERVER_SECONDS: seconds, **self.revealed.tensors()}

    def restore(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `state` and `tensors` returned."""
        self._stages = list(state["stages"])
        self._raw = None if (raw := state["raw"]) is None else RawSamples(**raw)
        self._cached.restore(state)
        self._rows.restore(tensors[_ROWS])
        self.server_seconds = tensors[_SERVER_SECONDS].tolist()
        self.revealed.restore(tensors)

    def _of_task(self, task: int) -> np.ndarray:
        """The rows of one task."""
        # `.searchsorted` on the field of all rows would copy the column each time.
        rows = self._rows.array
        first, end = (bisect_left(rows, number, key=lambda row: row["task"]) for number in (task, task + 1))
        return rows[first:end]

    def _tasks(self) -> Iterator[np.ndarray]:
        """The rows of each task that has any, in order."""
        tasks = 1 + int(self._rows.array["task"][-1]) if len(self) else 0
        return filter(len, map(self._of_task, range(tasks)))
