"""What a run's exchanges add up to: bytes and seconds per task, client and stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from fcl_bench.engine.exchanges import NOBODY_KNOWS, Exchanges

if TYPE_CHECKING:
    from fcl_bench.engine.reports import LabelCounts, Raw, Revealed, Seconds, StageExchanged, StagesExchanged


class Ledger(Exchanges):
    """All exchanges so far, and the questions that tables ask of them."""

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
        rows = self._rows.array if task is None else self._of_task(task)
        left_out = rows[rows["dropped"] > 0]
        return list(zip(left_out["client"].tolist(), left_out["round"].tolist(), strict=True))

    def communication(self) -> StagesExchanged:
        """FedRAN 2.3: bytes per client and task, summed over rounds, then the maximum; and totals.

        `by_stage` splits them as FedProTIP's Table 9 does.
        """
        up_total = np.zeros(self.clients, dtype=np.int64)
        up_max = down_max = down_total = 0
        stages: dict[str, StageExchanged] = {}
        for rows in self._tasks():
            up, down = self._per_client(rows, "up_bytes"), self._per_client(rows, "down_bytes")
            up_total += up
            up_max, down_max = max(up_max, int(up.max())), max(down_max, int(down.max()))
            down_total += int(down.sum())
            for number in np.unique(rows["stage"]).tolist():
                own = stages.setdefault(
                    self._stages[number],
                    {"up_max_bytes": 0, "up_max_bytes_by_task": [], "up_total_bytes": 0, "down_total_bytes": 0},
                )
                of_stage, by_task = rows[rows["stage"] == number], own["up_max_bytes_by_task"]
                sent = self._per_client(of_stage, "up_bytes")
                by_task += [0] * (int(rows["task"][0]) - len(by_task)) + [int(sent.max())]
                own["up_max_bytes"] = max(own["up_max_bytes"], by_task[-1])
                own["up_total_bytes"] += int(sent.sum())
                own["down_total_bytes"] += int(of_stage["down_bytes"].sum())
        tasks = 1 + int(self._rows.array["task"][-1]) if len(self) else 0
        for own in stages.values():  # a stage of the first task alone, say
            own["up_max_bytes_by_task"] += [0] * (tasks - len(own["up_max_bytes_by_task"]))
        return {
            "up_max_bytes": up_max,
            "up_total_max_bytes": int(up_total.max(initial=0)),
            "down_max_bytes": down_max,
            "up_total_bytes": int(up_total.sum()),
            "down_total_bytes": down_total,
            "raw": self._against_raw(),
            "by_stage": dict(sorted(stages.items())),
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

    def senders(self, late: bool = True) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield for each round its task, its number, and (m,) the clients whose upload the server came to read.

        A client that is lost after its keys (`secure=sums`) has sent bytes, but no upload.

        Args:
            late: whether the server can read an upload that comes late; with `secure=sums` it cannot.
        """
        for rows in self._tasks():
            for round_ in np.unique(rows["round"]).tolist():
                own = rows[rows["round"] == round_]
                read = (own["up_bytes"] > 0) & (own["lost"] == 0) & (late | (own["late"] == 0))
                yield int(own["task"][0]), round_, own["client"][read]

    def single_samples(self) -> Revealed:
        """How much clients revealed about single samples."""
        sums, moments = (
            int(self._rows.array[name].sum(dtype=np.int64)) for name in ("one_sample_sums", "one_sample_moments")
        )
        return {"one_sample_sums": sums, "one_sample_moments": moments, "revealed_samples": len(self.revealed)}

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
