"""The command `fcl-bench`: compose with Hydra, carry out each job, return the exit code."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import Any

from fcl_bench import __version__
from fcl_bench.cli.command import BUG, DONE, USER_ERROR, run_command
from fcl_bench.cli.job import job, no_collection, storage_error
from fcl_bench.cli.overrides import COMMANDS, composition_error, ordered
from fcl_bench.errors import UserError, first_line
from fcl_bench.sweep.workers import spin_briefly


def main() -> int:
    """The console script `fcl-bench`; returns the exit code: 0 done, 2 wrong input, 130 interrupted, 1 a bug."""
    return run_command("fcl-bench", _work, "the same command goes on where it stopped")


def _work() -> int:
    arguments = sys.argv[1:]
    spin_briefly()
    if arguments and arguments[0] in COMMANDS:
        return import_module(COMMANDS[arguments[0]]).work(arguments[1:])
    if "-h" in arguments or "--help" in arguments:
        from fcl_bench.cli.help import usage
        from fcl_bench.composition import config_dir

        print(usage(config_dir()), end="")
        return DONE
    if "--version" in arguments:
        print(f"fcl-bench {__version__}")
        return DONE
    return _hydra(ordered(arguments))


def _hydra(arguments: list[str]) -> int:
    """Compose with Hydra and run each job; the worst job's exit code."""
    # Hydra then raises what went wrong instead of printing its own report and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with no_collection():
        import hydra
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        from fcl_bench.composition import config_dir, register_presets
        from fcl_bench.sweep.watch import CALLBACK, sweeping

    # Only experiments have presets, and registering them takes as long as composing a run.
    if any("experiment" in argument for argument in arguments):
        register_presets()
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def each_job(config: Any) -> None:
        codes.append(job(config))

    if {"-m", "--multirun"} & set(arguments):
        arguments = [*arguments, CALLBACK]
    sys.argv[1:] = arguments
    with sweeping() as sweep:
        try:
            each_job()
        except (HydraException, OmegaConfBaseException) as error:
            raise composition_error(error, arguments) from error
        except (TypeError, ValueError, OSError) as error:
            # Before the first job this is Hydra failing on what was typed (method=[1], an out that can't be made).
            if codes or isinstance(error, BrokenPipeError):
                raise
            raise storage_error(error) or composition_error(error, arguments) from error
        except RuntimeError as error:
            # A launcher whose worker was killed says so; which jobs that leaves undone is in their reports.
            if not sweep.began:
                raise
            if re.match(r"(Invalid|Unknown) plugin", first_line(error)):
                told = f"hydra.launcher and hydra.sweeper: {first_line(error)}"
                raise UserError(told, "hydra/launcher=parallel, processes or slurm") from error
            print(f"fcl-bench: the launcher stopped: {first_line(error)}", file=sys.stderr)
            return BUG
        if sweep.began and not codes:  # the jobs ran in other processes
            codes = [BUG if report.code is None else report.code for report in sweep.reports()]
    return next((code for code in (BUG, USER_ERROR) if code in codes), DONE)
