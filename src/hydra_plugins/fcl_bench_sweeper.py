"""What Hydra accepts only from a package `hydra_plugins`: our sweeps (`-m`), and where choices are looked for."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper

_NODE = {"_target_": "hydra_plugins.fcl_bench_sweeper.JobSweeper", "params": None}
ConfigStore.instance().store(group="hydra/sweeper", name="fcl_bench", node=_NODE, provider="fcl_bench")


class OwnChoices(SearchPathPlugin):
    """Choices of installed packages, and of folders that the command names."""

    def manipulate_search_path(self, search_path: Any) -> None:
        """See Hydra's `SearchPathPlugin`."""
        from fcl_bench.composition import FOLDERS

        for folder in FOLDERS[1:]:
            search_path.append(provider="fcl-bench", path=f"file://{folder}")


class JobSweeper(Sweeper):
    """Every combination of the values typed; a job that does not compose fails, and the others run.

    Args:
        params: key -> values, as typed ("1,2").
    """

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self._params = params or {}

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """See Hydra's `Sweeper`."""
        self.hydra_context, self.config, self._task_function = hydra_context, config, task_function

    def sweep(self, arguments: list[str]) -> Any:
        """See Hydra's `Sweeper`."""
        # Imported only now: Hydra loads its plugins at the start of every command.
        from fcl_bench.composition import combinations
        from fcl_bench.sweeps.carrying_out import carry_out_jobs

        jobs = combinations([*(f"{key}={value}" for key, value in self._params.items()), *arguments])
        return carry_out_jobs(jobs, self.config, self.hydra_context, self._task_function)
