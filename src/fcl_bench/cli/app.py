"""The command `fcl-bench`: compose with Hydra, carry out each job, return the exit code."""

from __future__ import annotations

import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from fcl_bench import __version__
from fcl_bench.cli.command import BUG, DONE, USER_ERROR, run_command, storage_error
from fcl_bench.cli.job import job, no_collection
from fcl_bench.cli.overrides import COMMANDS, composition_error, ordered, without_folders
from fcl_bench.composition import config_dir, current, groups, register_budgets, register_presets
from fcl_bench.environment import spin_briefly
from fcl_bench.errors import UserError
from fcl_bench.tracking.console import say


def main() -> int:
    """The console script `fcl-bench`; returns the exit code: 0 done, 2 wrong input, 130 interrupted, 1 a bug."""
    # With it, the same command would start anew.
    forced = any(re.match(r"\+*force=(?i:true)$", argument) for argument in sys.argv[1:])
    command = "the same command without force=true" if forced else "the same command"
    return run_command("fcl-bench", _work, f"{command} goes on where it stopped")


def _work() -> int:
    arguments = sys.argv[1:]
    spin_briefly()
    words = without_folders(arguments)
    if words and words[0] in COMMANDS:
        return import_module(COMMANDS[words[0]]).work(words[1:])
    if {"-h", "--help"} & set(words):
        return _help(words)
    if "--version" in arguments:
        print(f"fcl-bench {__version__}")
        return DONE
    return _hydra(ordered(arguments))


def _help(arguments: list[str]) -> int:
    """Print the keys of the choices that were typed (`method=stsa_e --help`), or the general help if none was."""
    from fcl_bench.cli.help import usage
    from fcl_bench.cli.show import about

    typed = [argument.partition("=") for argument in current(arguments)]
    chosen = [about(group, choice) for group, equals, choice in typed if equals and group in groups()]
    if not chosen:
        print(usage(), end="")
        return DONE
    print("\n\n".join(chosen))
    print("\n`fcl-bench --help` lists all groups and the top-level keys.")
    return DONE


def _hydra(arguments: list[str]) -> int:
    """Compose with Hydra and run each job; return the worst job's exit code."""
    # With it, Hydra raises its errors instead of printing its own report and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with no_collection():
        import hydra
        import yaml
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

    # Only experiments have presets, and registering them takes as long as composing a run.
    if any("experiment" in argument for argument in arguments):
        register_presets()
    if any("track" in argument for argument in arguments):
        register_budgets()
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def each_job(config: Any) -> None:
        codes.append(job(config))

    sys.argv[1:] = arguments
    multirun = bool({"-m", "--multirun"} & set(arguments))
    if multirun and any(re.match(r"\+*transport=.*\branks\b", argument) for argument in arguments):
        raise UserError("-m with transport=ranks: every rank would be a sweep of its own", "one torchrun per run")
    around: AbstractContextManager[Any] = nullcontext()
    if multirun:
        from fcl_bench.sweeps.watch import sweeping  # a single run needs nothing of it

        around = sweeping(composition_error)
    with around as sweep:
        try:
            each_job()
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise composition_error(error, arguments) from error
        except (TypeError, ValueError, OSError) as error:
            # Before the first job, Hydra fails on what was typed (method=[1]).
            if codes or isinstance(error, BrokenPipeError):
                raise
            raise storage_error(error) or composition_error(error, arguments) from error
        except RuntimeError as error:
            # A launcher raises this if its worker was killed; the reports say which jobs are not done.
            if sweep is None or not sweep.began:
                raise
            # submitit names the job on its first line, and gives the cluster's message on the second.
            reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
            say(f"fcl-bench: the launcher stopped: {reason}", sys.stderr)
            return BUG
        if sweep is not None and sweep.began:
            # A job in another process without an exit code has died or never started.
            ended = [report.code for report in sweep.reports() if not codes or report.code is not None]
            codes += [BUG if code is None else code for code in ended]
    return next((code for code in (BUG, USER_ERROR) if code in codes), DONE)
