"""Of a sweep's jobs those that compose are run, and the others fail, each in a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fcl_bench.errors import UserError

#: Makes an error of ours of what composing raised, and of what was to be composed.
Explain = Callable[[Exception, list[str]], UserError]
#: Takes the jobs that do not compose, by their overrides.
Refuse = Callable[[list[tuple[tuple[str, ...], UserError]]], None]


@contextmanager
def jobs_that_compose(refuse: Refuse, explain: Explain) -> Iterator[None]:
    """A block in which Hydra's sweeper leaves out the jobs that do not compose, and hands them to `refuse`.

    Hydra composes every job of a batch before it starts the first, and one that fails ends them all. It has no setting
    for that, and takes sweepers of others only from a package `hydra_plugins`, so the check itself is replaced for the
    block. Where no job composes, the error of the first is raised, as without it.
    """
    from hydra.errors import HydraException
    from hydra.plugins.sweeper import Sweeper
    from omegaconf.errors import OmegaConfBaseException

    before = Sweeper.validate_batch_is_legal

    def keep_legal(self: Any, batch: Sequence[Sequence[str]]) -> None:
        if type(self).__name__ != "BasicSweeper":  # what others make of a shorter batch is not known
            return before(self, batch)
        loader = self.hydra_context.config_loader
        good: list[Sequence[str]] = []
        refused: list[tuple[tuple[str, ...], UserError]] = []
        first: Exception | None = None
        for job in batch:
            try:
                loader.load_sweep_config(master_config=self.config, sweep_overrides=list(job))
            except (HydraException, OmegaConfBaseException) as error:
                first = first or error
                refused.append((tuple(job), explain(error, list(job))))
            else:
                good.append(job)
        if first is not None and not good:
            raise first
        batch[:] = good  # type: ignore[index]
        if refused:
            refuse(refused)
        return None

    Sweeper.validate_batch_is_legal = keep_legal  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sweeper.validate_batch_is_legal = before  # type: ignore[method-assign]
