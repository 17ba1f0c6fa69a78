"""`logger=wandb`: a Weights & Biases run, kept on this machine unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fcl_bench.config import knob
from fcl_bench.files import writable
from fcl_bench.tracking import TrackedRun, Tracker, require_packages


@dataclass
class WandB:
    """A W&B run with the run's own id, so that a continued run is one run there too.

    Args:
        project: name of the W&B project.
        mode: offline (files in `<out>/wandb/` that `wandb sync` sends later), online.
    """

    name = "wandb"
    packages = ("wandb",)
    project: str = knob(filled=True, words="logger.project=NAME")
    mode: str = knob(choices=("offline", "online"))

    def start(self, run: TrackedRun) -> Tracker:
        require_packages(self)
        import wandb

        # Each process of an interrupted run leaves its own files; W&B joins them by the id.
        opened = wandb.init(
            project=self.project,
            id=run.id,
            name=run.label,
            resume="allow",
            mode=self.mode,
            dir=str(writable(f"out={run.out}", run.out / "wandb")),
            config=run.config,
            # No second set of signal handlers, no copy of the terminal, nothing printed between our lines.
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own step may only grow, so a task that is reported twice appears twice.
        opened.define_metric("task/*", step_metric="task/step")
        return _Run(opened)


class _Run(Tracker):
    """One W&B run, of this process."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._complete = False

    def task(self, metrics: dict[str, float], step: int) -> None:
        self._run.log({"task/step": step, **{f"task/{name}": value for name, value in metrics.items()}})

    def finish(self, metrics: dict[str, float]) -> None:
        self._run.summary.update(metrics)
        self._complete = True

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._complete else 1)
