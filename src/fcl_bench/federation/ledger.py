"""Bytes and seconds: per task, round, client and stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fcl_bench.federation.message import Message


class Stopwatch:
    """Wall-clock seconds of a block; on CUDA the block ends with a synchronisation."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device = device
        self.seconds = seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the block's seconds."""
        self._synchronise()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._synchronise()
            self.seconds += time.perf_counter() - begin

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(frozen=True)
class Upload:
    """One exchange of one client: a row of uploads.csv.

    Attributes:
        samples: the client's samples of the task.
        labelled: how many of them have a label.
        accepted: how many of the others the client gave one itself.
        right: how many of those labels are true.
    """

    task: int
    round: int
    client: int
    stage: str
    samples: int
    labelled: int
    accepted: int
    right: int
    up_bytes: int
    down_bytes: int
    client_seconds: float


@dataclass
class Ledger:
    """All exchanges so far and the server's seconds per task.

    Attributes:
        clients: K.
        uploads: the exchanges in order.
        server_seconds: of each complete task.
        kept: per client, the names of the broadcast tensors that it keeps (see `Message.kept`).
    """

    clients: int
    uploads: list[Upload] = field(default_factory=list)
    server_seconds: list[float] = field(default_factory=list)
    kept: dict[int, set[str]] = field(default_factory=dict)

    def send(self, client: int, broadcast: Message) -> int:
        """Bytes that `broadcast` costs this client, who has them from now on."""
        there = self.kept.setdefault(client, set()) if broadcast.kept else set()
        size = broadcast.nbytes_without(there)
        there |= broadcast.kept
        return size

    def state(self) -> dict[str, Any]:
        """The ledger as JSON."""
        return {
            "uploads": [asdict(row) for row in self.uploads],
            "server_seconds": self.server_seconds,
            "kept": {str(client): sorted(names) for client, names in self.kept.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.uploads = [Upload(**row) for row in state["uploads"]]
        self.server_seconds = list(state["server_seconds"])
        self.kept = {int(client): set(names) for client, names in state["kept"].items()}

    def _per_client_and_task(self, stage: str | None) -> dict[tuple[int, int], int]:
        sums: dict[tuple[int, int], int] = {}
        for row in self.uploads:
            if stage is None or row.stage == stage:
                sums[row.client, row.task] = sums.get((row.client, row.task), 0) + row.up_bytes
        return sums

    def _most_by_task(self, stage: str) -> list[int]:
        most: dict[int, int] = {}
        for (_, task), size in self._per_client_and_task(stage).items():
            most[task] = max(most.get(task, 0), size)
        return [most.get(task, 0) for task in range(1 + max(most, default=-1))]

    def task_totals(self, task: int) -> dict[str, float]:
        """Bytes up and down, client and server seconds of one task, summed over clients and rounds."""
        rows = [row for row in self.uploads if row.task == task]
        return {
            "up_bytes": sum(row.up_bytes for row in rows),
            "down_bytes": sum(row.down_bytes for row in rows),
            "client_seconds": sum(row.client_seconds for row in rows),
            "server_seconds": self.server_seconds[task],
        }

    def labels(self, task: int | None = None) -> dict[str, int]:
        """Samples, labels, accepted pseudo-labels and right ones, of one task or of all; each client counts once."""
        rows = [row for row in self.uploads if row.round == 0 and task in (None, row.task)]
        return {name: sum(getattr(row, name) for row in rows) for name in ("samples", "labelled", "accepted", "right")}

    def communication(self) -> dict[str, Any]:
        """FedRAN 2.3: bytes per client and task, summed over rounds, then the maximum; and totals.

        `up_max_bytes`: most that one client uploads for one task; `up_total_max_bytes`: the busiest client over the
        stream; `down_max_bytes`: most that one client receives for one task; `by_stage`: totals over everyone, and per
        task the most that one client uploads in that stage (as FedProTIP's Table 9 splits it).
        """
        per_task = self._per_client_and_task(None)
        per_client: dict[int, int] = {}
        for (client, _), size in per_task.items():
            per_client[client] = per_client.get(client, 0) + size
        down: dict[tuple[int, int], int] = {}
        for row in self.uploads:
            down[row.client, row.task] = down.get((row.client, row.task), 0) + row.down_bytes
        stages = sorted({row.stage for row in self.uploads})
        return {
            "up_max_bytes": max(per_task.values(), default=0),
            "up_total_max_bytes": max(per_client.values(), default=0),
            "down_max_bytes": max(down.values(), default=0),
            "up_total_bytes": sum(per_client.values()),
            "down_total_bytes": sum(down.values()),
            "by_stage": {
                stage: {
                    "up_max_bytes": max(self._per_client_and_task(stage).values(), default=0),
                    "up_max_bytes_by_task": self._most_by_task(stage),
                    "up_total_bytes": sum(row.up_bytes for row in self.uploads if row.stage == stage),
                    "down_total_bytes": sum(row.down_bytes for row in self.uploads if row.stage == stage),
                }
                for stage in stages
            },
        }

    def runtime(self) -> dict[str, float]:
        """`seconds_per_task` (FedRAN Eq. 1): mean over tasks of (mean over the K clients of client time + server's)."""
        client = sum(row.client_seconds for row in self.uploads)
        server = sum(self.server_seconds)
        tasks = max(len(self.server_seconds), 1)
        return {
            "seconds_per_task": (client / self.clients + server) / tasks,
            "client_seconds": client,
            "server_seconds": server,
        }
