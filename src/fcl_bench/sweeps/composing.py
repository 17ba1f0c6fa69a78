"""Runs the jobs of a sweep that compose and fails the others with one line each; each job is composed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fcl_bench.errors import UserError
from fcl_bench.sweeps.workers import runs_here

#: The most configurations that are kept for their jobs, at 0.1 megabytes each; later jobs are composed again.
_WAITING = 1000
#: Turns the error of composing, and the overrides that should have been composed, into an error of ours.
Explain = Callable[[Exception, list[str]], UserError]
#: Receives the overrides and the error of each job that does not compose.
Refuse = Callable[[list[tuple[tuple[str, ...], UserError]]], None]


def _taken_first(composed: dict[tuple[str, ...], Any], compose: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compose` for the jobs of a sweep; it first hands out the configurations in `composed`, each once."""

    def load_sweep_config(master_config: Any, sweep_overrides: list[str]) -> Any:
        found = composed.pop(tuple(sweep_overrides), None)
        return compose(master_config, sweep_overrides) if found is None else found

    return load_sweep_config


@contextmanager
def jobs_that_compose(refuse: Refuse, explain: Explain) -> Iterator[None]:
    """In the block, Hydra's sweeper leaves out the jobs that do not compose, and passes them to `refuse`.

    Hydra composes every job of a batch before it starts the first, and one that fails ends them all. It has no setting
    for that, and accepts other sweepers only from a package `hydra_plugins`, so the check itself is replaced in the
    block. If no job composes, the error of the first is raised, as without the replacement.

    If the jobs run in this process, their configurations are kept: composing takes a fifth of a default run on digits,
    and Hydra does it once to check and once to run.
    """
    from hydra.errors import HydraException
    from hydra.plugins.sweeper import Sweeper
    from omegaconf.errors import OmegaConfBaseException

    before = Sweeper.validate_batch_is_legal

    def keep_legal(self: Any, batch: Sequence[Sequence[str]]) -> None:
        if type(self).__name__ != "BasicSweeper":  # other sweepers may not accept a shorter batch
            return before(self, batch)
        loader = self.hydra_context.config_loader
        vars(loader).pop("load_sweep_config", None)  # left from the batch before
        good: list[Sequence[str]] = []
        refused: list[tuple[tuple[str, ...], UserError]] = []
        first: Exception | None = None
        composed: dict[tuple[str, ...], Any] = {}
        for job in batch:
            try:
                made = loader.load_sweep_config(master_config=self.config, sweep_overrides=list(job))
                if len(composed) < _WAITING:
                    composed[tuple(job)] = made
            except (HydraException, OmegaConfBaseException) as error:
                first = first or error
                refused.append((tuple(job), explain(error, list(job))))
            else:
                good.append(job)
        if first is not None and not good:
            raise first
        batch[:] = good  # type: ignore[index]
        if runs_here(self.config.hydra.launcher):
            loader.load_sweep_config = _taken_first(composed, loader.load_sweep_config)
        if refused:
            refuse(refused)
        return None

    Sweeper.validate_batch_is_legal = keep_legal  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sweeper.validate_batch_is_legal = before  # type: ignore[method-assign]
