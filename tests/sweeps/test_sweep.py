"""Sweeps over processes: shared machine, live lines, failures with their commands, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fcl_bench.sweeps import workers
from fcl_bench.sweeps.jobs import DONE, FAILED, INTERRUPTED, RUNNING, WAITING, JobReport, read_reports, write_report
from fcl_bench.sweeps.summary import failures
from fcl_bench.sweeps.watch import Sweep
from tests.conftest import REPOSITORY, write_features

SMALL = ("method.M=16", "method.rank=8", "tasks=2", "clients=2", "cache.enabled=false")


def cores() -> int:
    from joblib import cpu_count

    return cpu_count()


@pytest.mark.slow
def test_jobs_side_by_side_share_the_cores_and_report_back(command, tmp_path, plain_environment):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    data = ("data=features", f"data.path={write_features(tmp_path / 'f.npz')}", f"out={tmp_path / 'with space'}")
    parallel = ("-m", "hydra/launcher=parallel", "hydra.launcher.n_jobs=2")
    before = dict(os.environ)
    code, out, err = command(*parallel, *data, *SMALL, "beta=0.5,-1", "method.ridge=0.001,0.1")
    assert code == 2
    kept = ("HYDRA_FULL_ERROR", "GOMP_SPINCOUNT", "OPENBLAS_THREAD_TIMEOUT")  # the command's own, of any run
    assert {**os.environ} == before | {name: os.environ[name] for name in kept}
    for number in (1, 2):
        assert f"run {number} of 4 done in " in out
    assert "sweep: 2 done, 2 failed\n" in out
    assert "2 of 4 runs failed" in err
    for number in (3, 4):
        assert re.search(rf"run {number} of 4 failed: beta=-1 method.ridge=\S+: beta=-1.0 is out of range", err)
    # The jobs' own output is in files of theirs.
    assert "accuracy on all classes seen" not in out
    [sweep] = (tmp_path / "with space" / "sweeps").iterdir()
    assert "accuracy on all classes seen" in (sweep / "jobs" / "0.log").read_text()
    assert "beta=-1.0 is out of range" in (sweep / "jobs" / "2.log").read_text()
    # Each worker imported torch with its share of the cores.
    records = [json.loads(path.read_text()) for path in (tmp_path / "with space" / "runs").glob("*/run.json")]
    assert [record["environment"]["threads"] for record in records] == 2 * [max(1, cores() // 2)]
    # The printed command repeats the job alone.
    lines = [line.strip() for line in out.splitlines() if line.startswith("    fcl-bench ")]
    assert len(lines) == 2
    code, _, err = command(*shlex.split(lines[0])[1:])
    assert (code, err) == (2, "fcl-bench: error: beta=-1.0 is out of range (a finite number, 1e-06 or more)\n")
    # The same command reports what is complete.
    code, out, _ = command(*parallel, *data, *SMALL, "beta=0.5", "method.ridge=0.001,0.1")
    assert code == 0
    assert out.count(" of 2 was complete already: ") == 2


@pytest.mark.slow
def test_jobs_as_submitit_sends_them(command, tmp_path, plain_environment):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    data = ("data=features", f"data.path={write_features(tmp_path / 'f.npz')}", f"out={tmp_path}")
    code, out, err = command("-m", "hydra/launcher=processes", *data, *SMALL, "beta=0.5,-1")
    assert code == 2
    assert "sweep: 1 done, 1 failed\n" in out
    assert "run 2 of 2 failed: beta=-1: beta=-1.0 is out of range" in err
    [record] = (tmp_path / "runs").glob("*/run.json")
    assert json.loads(record.read_text())["environment"]["threads"] == max(1, cores() // 2)


def test_slurm_is_composed_with_what_a_run_needs(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    from hydra import compose, initialize_config_dir

    from fcl_bench.composition import config_dir

    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        chosen = ["hydra/launcher=slurm", "hydra.launcher.partition=gpu"]
        launcher = compose("config", overrides=chosen, return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith(".SlurmLauncher")
    assert (launcher.partition, launcher.gpus_per_node, launcher.max_num_timeout) == ("gpu", 1, 3)
    assert workers.jobs_at_once(launcher, 8) is None
    assert not workers.runs_here(launcher)


def test_a_job_that_a_cluster_starts_again_is_told_again(tmp_path, capsys):
    """Slurm interrupts a job at its time limit and queues it again; then it ends."""
    sweep = Sweep()
    sweep.folder, sweep.workers, sweep.jobs, sweep.began = tmp_path, None, [("seed=0",), ("seed=1",)], True
    for status in (INTERRUPTED, RUNNING, DONE):
        write_report(tmp_path, JobReport(0, ["seed=0"], status, seconds=3.0))
        sweep._print_news()
        sweep._print_news()
    assert capsys.readouterr().out.splitlines() == [
        "run 1 of 2 interrupted: seed=0",
        "run 1 of 2 done in 3 s: seed=0",
    ]
    # One that was cancelled says nothing more.
    write_report(tmp_path, JobReport(1, ["seed=1"], RUNNING))
    sweep.close()
    assert capsys.readouterr().out.splitlines() == [
        "",
        "sweep: 1 done, 0 failed, 1 left (the same command goes on with them)",
    ]


def test_what_a_launcher_says_of_a_job_that_died_is_told_whole(command, tmp_path, monkeypatch):
    core = pytest.importorskip("hydra_plugins.hydra_joblib_launcher._core")

    def died(*_, **__):
        raise RuntimeError("Job 10_1 (task: 0) with path p\nhas not produced any output (state: CANCELLED by 0)\nError")

    monkeypatch.setattr(core, "launch", died)
    code, _, err = command("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1", f"out={tmp_path}")
    assert code == 1
    said = "Job 10_1 (task: 0) with path p has not produced any output (state: CANCELLED by 0)"
    assert f"fcl-bench: the launcher stopped: {said}\n" in err


def test_a_job_that_meets_its_time_limit_too_often_is_no_bug(command, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    from submitit.core.utils import UncompletedJobError

    def out_of_time(*_):
        raise UncompletedJobError("Job not requeued because: timed-out too many times.\nmore")

    monkeypatch.setattr("fcl_bench.execution.run.run", out_of_time)
    code, _, err = command("-m", f"out={tmp_path}", "seed=0,1")
    assert code == 2
    assert "Traceback" not in err
    said = "the job met its time limit: Job not requeued because: timed-out too many times."
    assert f"{said} (a larger hydra.launcher.timeout_min; " in err


@pytest.mark.slow
def test_a_killed_worker_is_told_with_its_command(command, tmp_path, plain_environment):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    deadly = ("data._target_=tests.sweeps.sweep_cases.Deadly", "data.name=deadly", "seed=0,1", f"out={tmp_path}")
    code, out, err = command("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *deadly)
    assert code == 1
    assert "the launcher stopped: " in err
    assert "Traceback" not in err
    assert "its process ended without a word: killed, or out of memory" in out
    # Both die, and either may be the first.
    commands = {f"    fcl-bench {deadly[0]} {deadly[1]} seed={seed} {deadly[3]}" for seed in (0, 1)}
    assert commands & set(out.splitlines())


def test_one_job_at_a_time_stays_in_this_process(command, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    one = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    code, out, err = command("-m", *one, f"out={tmp_path}", "seed=-1,-2")
    assert code == 2
    assert "fcl-bench: run 1 of 2 failed: seed=-1: seed=-1 is out of range" in err
    assert "fcl-bench: run 2 of 2 failed: seed=-2: seed=-2 is out of range" in err
    assert "sweep: 0 done, 2 failed\n" in out
    [sweep] = (tmp_path / "sweeps").iterdir()
    assert "fcl-bench: error: seed=-2 is out of range" in (sweep / "jobs" / "1.log").read_text()


def test_a_sweep_with_a_failure_lists_it_with_its_command(command, tmp_path):
    code, out, err = command("-m", f"out={tmp_path}/a b", "seed=-1,-2", "method=fedran,stsa", "clients=3")
    assert code == 2
    assert "4 of 4 runs failed" in err
    assert "  seed=-2 is out of range (an integer of at least 0)\n" in out
    commands = [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("    fcl-bench ")]
    # With the quotes that Hydra's grammar wants around the space.
    assert [f"out='{tmp_path}/a b'", "seed=-2", "method=stsa", "clients=3"] in commands


def test_folders_are_named_as_they_were_typed(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_features(tmp_path / "f.npz")
    _, out, _ = command("-m", "out=here", "data=features", "data.path=f.npz", *SMALL, "seed=0,1")
    assert "runs: here/runs; what each printed: here/sweeps/" in out


def test_an_interrupted_sweep_says_what_is_left(command, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fcl_bench.execution.run.make_plan", interrupted)
    code, out, _ = command("-m", f"out={tmp_path}", "seed=-1,0,1")
    assert code == 130
    assert "sweep: 0 done, 1 failed, 2 left (the same command goes on with them)" in out


@pytest.mark.slow
def test_a_launcher_that_is_not_installed_is_told():
    choices = ["parallel", "joblib", "processes", "slurm", "submitit_local"]
    program = (
        "import sys, types\n"
        "sys.modules['hydra_plugins'] = types.ModuleType('hydra_plugins')\n"
        f"sys.modules['hydra_plugins'].__path__ = [{str(REPOSITORY / 'src' / 'hydra_plugins')!r}]\n"
        "from fcl_bench.cli.app import main\n"
        f"for choice in {choices}:\n"
        "    sys.argv = ['fcl-bench', '-m', f'hydra/launcher={choice}', 'seed=0,1']\n"
        "    assert main() == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        f"fcl-bench: error: hydra/launcher={choice}: its launcher is not installed "
        "(in the checkout of fcl-bench: pip install '.[sweep]')"
        for choice in choices
    ]


def launcher(kind: str, **knobs):
    return OmegaConf.create({"_target_": f"some.module.{kind}", **knobs})


def test_how_many_jobs_run_at_once():
    assert workers.jobs_at_once(launcher("BasicLauncher"), 7) == 1
    assert workers.jobs_at_once(launcher("JoblibLauncher", n_jobs=3), 7) == 3
    assert workers.jobs_at_once(launcher("JoblibLauncher", n_jobs=3), 2) == 2
    assert workers.jobs_at_once(launcher("JoblibLauncher", n_jobs=-1), None) == cores()
    assert workers.jobs_at_once(launcher("LocalLauncher"), 7) == 7
    assert workers.jobs_at_once(launcher("SlurmLauncher"), 7) is None


reports = st.builds(
    JobReport,
    number=st.integers(0, 50),
    overrides=st.lists(st.text("abc='\" =,$", max_size=8), max_size=3),
    status=st.sampled_from([RUNNING, DONE, FAILED, INTERRUPTED]),
    code=st.sampled_from([None, 0, 1, 2]),
    reason=st.just("why"),
    was_complete=st.booleans(),
    seconds=st.floats(0, 1e5),
)


@given(reports)
def test_the_command_of_a_failure_is_what_a_shell_reads_back(report):
    assert shlex.split(report.command) == ["fcl-bench", *report.overrides]
    assert (failures([report]) == []) == (report.status != FAILED)


def test_a_reason_stands_once_above_the_commands_of_its_failures():
    failed = [JobReport(n, [f"seed={n}"], FAILED, 2, reason) for n, reason in enumerate(("why", "else", "why"))]
    assert failures(failed) == [
        *("  why", "    fcl-bench seed=0", "    fcl-bench seed=2"),
        *("  else", "    fcl-bench seed=1"),
    ]


@pytest.mark.parametrize(("at_once", "status", "code"), [(2, FAILED, 1), (None, RUNNING, None)])
def test_a_job_without_an_end_has_failed_unless_it_runs_elsewhere(tmp_path, at_once, status, code):
    write_report(tmp_path, JobReport(0, ["seed=0"]))
    sweep = Sweep()
    sweep.folder, sweep.jobs, sweep.workers = tmp_path, [("seed=0",), ("seed=1",)], at_once
    first, second = sweep.reports()
    assert (first.status, first.code) == (status, code)
    assert (second.status, second.overrides, second.code) == (WAITING, ["seed=1"], None)


def test_a_grid_of_the_configuration_counts_as_what_is_typed(command, tmp_path):
    """`hydra.sweeper.params`, which experiments fill in: same jobs as Hydra's sweeper makes of it."""
    grid = "++hydra.sweeper.params={seed:'-1,-2',clients:'2,3'}"
    code, _, err = command("-m", grid, f"out={tmp_path}", "clients=4,5,6")
    assert code == 2
    assert "6 of 6 runs failed" in err
    assert "run 6 of 6 failed: seed=-2 clients=6: seed=-2 is out of range" in err


def test_the_jobs_are_counted_as_hydras_sweeper_makes_them(command, tmp_path):
    """Its functions, a group's choices by a pattern, and a key that is given twice."""
    code, _, err = command(
        "-m", "method=glob(af*)", "clients=range(2,9)", "seed=choice(-1,-2)", "clients=3", f"out={tmp_path}"
    )
    assert code == 2
    assert "run 4 of 4 failed: method=afl seed=-2: " in err


def test_reports_read_back(tmp_path):
    written = [JobReport(n, [f"seed={n}"], FAILED, 2, "why", False, 1.5, "runs/a") for n in (10, 2)]
    for report in written:
        write_report(tmp_path, report)
    assert list(read_reports(tmp_path).values()) == written[::-1]
    assert read_reports(tmp_path / "nowhere") == {}
    (tmp_path / "jobs" / "2.json").write_bytes(b'{"number": 2, \xff')
    (tmp_path / "jobs" / "3.json").write_text("[]")
    assert list(read_reports(tmp_path)) == [10]


@pytest.mark.slow_cases("the last one of each job")
@pytest.mark.parametrize("last", [False, True], ids=["every report", "the last one of each job"])
def test_a_sweep_whose_folder_cannot_hold_reports_fails_with_a_line(command, tmp_path, monkeypatch, last):
    import errno

    def full(sweep, report):
        if last and report.status == RUNNING:
            return write_report(sweep, report)
        raise OSError(errno.ENOSPC, "No space left on device", "0.json")

    monkeypatch.setattr("fcl_bench.sweeps.jobs.write_report", full)
    code, out, err = command("-m", f"out={tmp_path}", "seed=0,1")
    assert code == 2
    assert err.count("fcl-bench: error: writing failed, 0.json: No space left on device") == 2
    # What is on disk still says that they run.
    assert "sweep: 0 done, 0 failed, 2 left (the same command goes on with them)" in out
    assert "killed" not in out


def test_jobs_that_do_not_compose_fail_and_the_others_run(command, tmp_path):
    code, out, err = command(
        "-m", f"out={tmp_path}", *SMALL[:1], "tasks=2", "clients=2", "method=stsa,nope", "seed=0,1"
    )
    assert code == 2
    assert "fcl-bench: run 3 of 4 failed: method=nope seed=0: method=nope is not known (one of " in err
    assert "run 2 of 4 done in " in out
    assert "sweep: 2 done, 2 failed\n" in out
    assert f"    fcl-bench out={tmp_path} method.M=16 tasks=2 clients=2 method=nope seed=1\n" in out
    # What the runs printed is in files, and one command makes tables of these runs.
    [sweep] = (tmp_path / "sweeps").iterdir()
    assert "accuracy on all classes seen" not in out
    assert "accuracy on all classes seen" in (sweep / "jobs" / "1.log").read_text()
    assert f"fcl-tables --out {tmp_path} --sweep {sweep.name}" in out
    assert "│ method=stsa │" in out


def test_where_no_job_composes_there_is_one_line(command, tmp_path):
    code, out, err = command("-m", f"out={tmp_path}", "method=nope,nopf", "seed=0,1")
    assert (code, out) == (2, "")
    assert err.startswith("fcl-bench: error: method=nope is not known")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_preview_of_a_sweep_is_printed(command, tmp_path):
    code, out, _ = command("-m", f"out={tmp_path}", "preview=true", "seed=0,1")
    assert code == 0
    assert out.count("preview: ") == 2
