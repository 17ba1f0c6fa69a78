"""`fcl-bench tune`: search keys for the best result; every trial is an ordinary run with its own id."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fcl_bench.cli.command import DONE, Parser
from fcl_bench.cli.overrides import composed_as_typed, ordered
from fcl_bench.composition import NAMED_BY
from fcl_bench.config import Settings, load_settings, text
from fcl_bench.data.shared import sharing
from fcl_bench.errors import UserError, require_choice
from fcl_bench.files import json_hash, locked, replacing, slug, user_path, writable
from fcl_bench.results.measures import MEASURES
from fcl_bench.sweeps.jobs import JobReport, output_path, reported
from fcl_bench.sweeps.search import RULES, Pruning, Range, ended, next_trial, open_study, parse_range, require_optuna
from fcl_bench.tracking import Tracker, load_tracking
from fcl_bench.tracking.console import duration, log_to_terminal, printed_to, say

#: Metrics by which trials can be pruned, since a run reports them after each task; others allow no pruning.
_PRUNED_BY = ("A_avg", "A_T")
#: What trials are tested on, unless the user says otherwise.
_VALIDATION = ("data.validation=0.1", "data.test=false")
#: The seed of a search: its class order, partition and weights are those of no run that a table has.
_SEED = "1000"
#: The number of trials that are listed at the end.
_LISTED = 5


@dataclass(frozen=True)
class _Search:
    """The search that was asked for.

    Attributes:
        declared: whether the method declares `space`; if not, the user typed it.
        seeds: the seeds of every trial; its value is their mean.
        on_test: whether the test set chooses; if not, no trial looks at it.
    """

    fixed: list[str]
    space: dict[str, Range]
    declared: bool
    seeds: list[str]
    metric: str
    prune: bool
    on_test: bool

    def defaults(self) -> dict[str, str]:
        """What the configuration has for the keys of the space, as it is typed; {} if that is not in a typed range."""
        try:
            config = composed_as_typed([*self.fixed, f"seed={self.seeds[0]}"], with_hydra=True)
        except UserError:  # of the knobs of a method that is searched, too
            return {}
        chosen, names = dict(config.hydra.runtime.choices), {key: key.lstrip("+") for key in self.space}
        found = {key: chosen.get(name, OmegaConf.select(config, name)) for key, name in names.items()}
        typed = {key: "null" if value is None else text(value) for key, value in found.items()}
        return typed if self.declared or all(self.space[key].has(typed[key]) for key in typed) else {}

    def overrides(self, values: dict[str, str], seed: str) -> list[str]:
        """The overrides of one run."""
        return [*self.fixed, *(f"{key}={value}" for key, value in values.items()), f"seed={seed}"]


def work(arguments: list[str]) -> int:
    """Carry out the trials that are left, and print the best. Raises a `UserError` for wrong input."""
    parser = Parser(
        prog="fcl-bench tune",
        usage="fcl-bench tune [options] key=value ... key=RANGE ...",
        description="Search keys for the best result with Optuna, on validation samples: a tenth of every client's"
        " training samples, which no client trains on. Without a RANGE the knobs are searched that the method itself"
        " declares. A RANGE is log(1e-4,1), uniform(0,1), int(1,8), int_log(8,512), choice(a,b) or a,b. With seed=7,8"
        " every trial is run with each seed, and the mean counts. The same command goes on where it stopped; with more"
        " --trials, further.",
        epilog="example: fcl-bench tune method=fedavg backbone=tiny profile=quick --trials 20"
        " 'method.training.lr=log(1e-3,1)' method.training.epochs=1,2,5",
    )
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="in all, earlier ones included (20)")
    parser.add_argument("--metric", default="A_avg", metavar="NAME", help="the measure to optimise: A_T, ... (A_avg)")
    parser.add_argument("--study", default="", metavar="NAME", help="name of the study; default: from what is searched")
    parser.add_argument("--on-test", action="store_true", help="choose by the test set, and say so in the result")
    parser.add_argument("--no-pruning", action="store_true", help="carry every trial through to its last task")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys, values and ranges")
    options = parser.parse_intermixed_args(arguments)
    require_choice("--metric", options.metric, MEASURES)
    if options.trials < 1:
        raise UserError(f"--trials {options.trials} is out of range", "1 or more")
    if options.study and not re.fullmatch(r"\w[\w.+-]*", options.study):
        raise UserError(
            f"--study {options.study} is not a plain name", "a letter or digit, then letters, digits, -, _ and ."
        )
    search = _search(options.overrides, options.metric, not options.no_pruning, options.on_test)
    require_optuna()
    # Everything is checked before the first trial, since a wrong key concerns all trials.
    some = {key: space.values[0] for key, space in search.space.items()}
    settings, _ = _composed(search.overrides(some, search.seeds[0]))
    _tune(search, settings, options.study, options.trials)
    return DONE


def _search(typed: list[str], metric: str, prune: bool, on_test: bool) -> _Search:
    fixed, space, seeds = [], {}, [_SEED]
    for override in ordered(typed):
        if override.startswith("seed="):
            seeds = override.removeprefix("seed=").split(",")
        elif found := parse_range(override):
            space[found[0]] = found[1]
        else:
            fixed.append(override)
    keys = {override.partition("=")[0] for override in fixed}
    if "data.test" in keys or (on_test and "data.validation" in keys):
        what = "tune says itself what trials are tested on"
        raise UserError(what, "--on-test for the test set, or data.validation=SHARE alone")
    if not on_test:
        fixed += [share for share in _VALIDATION if share.partition("=")[0] not in keys]
    if declared := not space:
        method = _composed([*fixed, f"seed={seeds[0]}"])[0].method
        ranges = (
            f"method.{key}={values}" for key, values in method.search_space().items() if f"method.{key}" not in keys
        )
        space = dict(found for found in map(parse_range, ranges) if found)
        if not space:
            raise UserError(
                f"tune has nothing to search: method={method.name} declares no knob of its own",
                "a range, such as 'method.ridge=log(1e-4,1)'",
            )
    return _Search(fixed, space, declared, seeds, metric, prune and metric in _PRUNED_BY, on_test)


def _composed(overrides: list[str]) -> tuple[Settings, Tracker]:
    config = composed_as_typed(overrides)
    settings = load_settings(config)
    if settings.transport.launched:
        what = f"tune with transport={settings.transport.name}: every rank would be a search of its own"
        raise UserError(what, "one torchrun per run")
    return settings, load_tracking(config)


def _tune(search: _Search, settings: Settings, name: str, trials: int) -> None:
    content: dict[str, Any] = {"fixed": sorted(search.fixed), "seeds": search.seeds, "metric": search.metric}
    content |= {"revision": settings.method.revision, "rules": RULES, "first": search.defaults()}  # all change results
    content |= {"space": {key: [space.kind, *space.values] for key, space in search.space.items()}}
    label = "-".join(map(slug, (settings.method.name, settings.data.name)))
    name = name or f"tune-{label}-{json_hash(content)[:8]}"
    out = user_path("out", settings.scalars.out)
    folder = writable(f"out={settings.scalars.out}", out / "studies")
    with locked(folder / f".{name}.lock", f"working on the study {name}"):
        study = open_study(folder, name, content, MEASURES[search.metric].higher)
        before = len(ended(study))
        if before:
            say(f"study {name}: {before} of {trials} trials are there already")
        with sharing():
            begun = time.monotonic()
            while (number := len(ended(study))) < trials:
                which = f"trial {number + 1} of {trials}"
                _trial(search, study, out / "sweeps" / name, which, settings.scalars.tasks)
                each = (time.monotonic() - begun) / (number + 1 - before)
                if left := trials - number - 1:
                    say(f"  about {duration(each * left)} left")
    _summary(search, study, out, name)


def _trial(search: _Search, study: Any, folder: Path, which: str, tasks: int) -> None:
    """Carry out one trial; print a line. Raises a `UserError` if one but the defaults' fails before any is complete."""
    optuna = require_optuna()
    # What is searched begins with what the configuration has, so no choice is worse than it on what chooses.
    defaults = {} if ended(study) else search.defaults()
    trial = next_trial(study)
    values = defaults or {key: space.suggested(trial, key) for key, space in search.space.items()}
    trial.set_user_attr("values", values)
    typed = " ".join(f"{key}={value}" for key, value in values.items())
    found = []
    try:
        for number, seed in enumerate(search.seeds):
            report = JobReport(trial.number * len(search.seeds) + number, search.overrides(values, seed))
            found.append(_run(search, trial, folder, report, number, tasks))
    except optuna.TrialPruned as error:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        say(f"{which} pruned {error}: {typed}")
    except Exception as error:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        complete = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
        if not isinstance(error, UserError) or not (complete or defaults):
            raise
        say(f"{which} failed: {typed}: {error}")
    else:
        value = statistics.fmean(found)
        study.tell(trial, value)
        say(f"{which}: {search.metric} {value:.4g}: {typed}  [best {study.best_value:.4g}]")


def _run(search: _Search, trial: Any, folder: Path, report: JobReport, number: int, tasks: int) -> float:
    """Carry out one run of a trial and return its metric; the run prints into a file."""
    from fcl_bench.execution.run import run
    from fcl_bench.execution.screen import print_record
    from fcl_bench.results.collect import measured

    settings, tracking = _composed(report.overrides)
    with reported(folder, report):
        try:
            with printed_to(output_path(folder, report.number)):
                log_to_terminal("fcl-bench", report.warnings)
                pruning = Pruning(trial, number * tasks, tasks, tracking) if search.prune else None
                outcome = run(settings, pruning or tracking)
                print_record(outcome.record, str(outcome.folder))
                if pruning:
                    pruning.complete(outcome.record["metrics"]["accuracy"])
        except Exception as error:
            report.code, report.reason = 2 if isinstance(error, UserError) else None, str(error)
            raise
        report.code, report.run, report.was_complete = DONE, str(outcome.folder), outcome.was_complete
        value = measured(outcome.record)[search.metric]
        if value is None or not math.isfinite(value):
            raise UserError(f"--metric {search.metric} is not defined for {outcome.folder.name}", "another --metric")
    return float(value)


def _summary(search: _Search, study: Any, out: Path, name: str) -> None:
    """Print the best trials, the command of the best, and the paths of the files."""
    done = [trial for trial in ended(study) if trial.value is not None and trial.state.name == "COMPLETE"]
    count = {state: sum(trial.state.name == state for trial in ended(study)) for state in ("PRUNED", "FAIL")}
    say(f"\nstudy {name}: {len(done)} complete, {count['PRUNED']} pruned, {count['FAIL']} failed")
    if not done:
        raise UserError(f"no trial of the study {name} is complete", "more --trials, or other ranges")
    higher = MEASURES[search.metric].higher
    best = sorted(done, key=lambda trial: trial.value, reverse=higher)[:_LISTED]
    for trial in best:
        values = trial.user_attrs["values"]
        say(f"  {search.metric} {trial.value:.4g}  {' '.join(f'{key}={value}' for key, value in values.items())}")
    ties = {str(trial.user_attrs["values"]) for trial in done if trial.value == best[0].value}
    if len(ties) > 1:
        say(f"an exact tie: {len(ties)} choices have this {search.metric}; the first is called the best below")
    multirun = ["-m"] if len(search.seeds) > 1 else []
    values = best[0].user_attrs["values"]
    overrides = search.overrides(values, ",".join(search.seeds))
    command = shlex.join(["fcl-bench", *multirun, *NAMED_BY, *overrides])
    where = "" if str(out) == "outputs" else f" --out {shlex.quote(str(out))}"
    say(f"best: {command}")
    say(f"tables of these runs: fcl-tables{where} --sweep {name}; the study: {out / 'studies' / name}.journal")
    choice = out / "studies" / f"{name}.yaml"
    with replacing(choice) as new:
        new.write_text(_chosen(search, best[0], command))
    say(f"the choice: {choice}")
    if not search.on_test:
        fixed = [typed for typed in search.fixed if typed not in _VALIDATION]
        tested = dataclasses.replace(search, fixed=fixed).overrides(values, "0,1,2")
        say(f"with all training samples, on the test set: {shlex.join(['fcl-bench', '-m', *NAMED_BY, *tested])}")
    else:
        say(f"{search.metric} is measured on the test set: say so, or report the choice on other data.")


def _chosen(search: _Search, best: Any, command: str) -> str:
    """The values of a trial as YAML, in the form of a file of conf/track/."""
    where = "THE TEST SET, which chose these values" if search.on_test else "validation samples"
    found = f"{search.metric} {best.value:.4g} on {where}, seed {','.join(search.seeds)}, trial {best.number}"
    chosen = OmegaConf.from_dotlist([f"{key}={value}" for key, value in best.user_attrs["values"].items()])
    return f"# @package _global_\n# {found}\n# {command}\n{OmegaConf.to_yaml(chosen)}"
