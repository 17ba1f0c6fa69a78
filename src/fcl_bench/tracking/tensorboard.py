"""`logger=tensorboard`: event files that `tensorboard --logdir` shows."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from fcl_bench.files import writable
from fcl_bench.tracking import TrackedRun, Tracker, require_packages


@dataclass
class TensorBoard:
    """Event files in `<out>/tensorboard/<run>/`: one point per task, and the record's numbers at the end."""

    name = "tensorboard"
    packages = ("tensorboard",)

    def start(self, run: TrackedRun) -> Tracker:
        require_packages(self)
        from torch.utils.tensorboard import SummaryWriter

        folder = writable(f"out={run.out}", run.out / "tensorboard") / run.label
        if run.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        # Points that a killed process wrote before it saved its checkpoint are written again, so purge them: at 0, all.
        return _Events(SummaryWriter(str(folder), purge_step=run.tasks_done), run)


class _Events(Tracker):
    """One run's event file."""

    def __init__(self, writer: Any, run: TrackedRun) -> None:
        self._writer = writer
        rows = [f"| {name} | {value} |" for name, value in run.config.items()]
        writer.add_text("config", "\n".join(["| key | value |", "| --- | --- |", *rows]))

    def task(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"task/{name}", value, step)
        self._writer.flush()

    def finish(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"record/{name}", value, 0)

    def close(self) -> None:
        self._writer.close()
