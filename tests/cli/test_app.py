"""The command as a user meets it: paths, help, sweeps, exit codes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import TextIO

import pytest

from fcl_bench.cli.overrides import COMMANDS
from tests.conftest import write_features
from tests.small_runs import interrupt_at

SMALL = ("method.M=32", "method.rank=8", "tasks=2", "clients=2")


def unread() -> TextIO:
    """A stream whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def full() -> TextIO:
    return open("/dev/full", "w")


@pytest.mark.parametrize("stream", [unread, full])
@pytest.mark.parametrize(
    "typed", [("clients=0",), ("-m", "method=stsa", "clients=0,-1"), ("show", "nothing")], ids=lambda typed: typed[0]
)
def test_the_exit_code_does_not_depend_on_who_reads_stderr(command, tmp_path, monkeypatch, stream, typed):
    """`fcl-bench ... 2>&1 | head -1` ended with 0 for wrong input, and on a full disk with 1."""
    with stream() as err:
        monkeypatch.setattr(sys, "stderr", err)
        assert command(*typed, *(() if typed[0] == "show" else (f"out={tmp_path}",)))[0] == 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_told(command, tmp_path, monkeypatch, number):
    """Such as NFS without its lock daemon."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    path = write_features(tmp_path / "f.npz")
    code, _, err = command(f"out={tmp_path}/out", "data=features", f"data.path={path}", *SMALL)
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(rf"writing failed, {tmp_path}/out/runs/.locks/\S+\.lock: {os.strerror(number)} \(out=FOLDER", err)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_is_no_bug(command, monkeypatch, name):
    """As `>&-` leaves it: Python has None in its place."""
    monkeypatch.setattr(sys, name, None)
    assert command("show")[0] == 0


@pytest.mark.parametrize(
    "name", ["with space (1).npz", "a=b,c.npz", "it's.npz", "特徴.npz", "[x]{y}.npz", "~tilde.npz"]
)
def test_paths_need_no_quotes_beyond_the_shells(command, tmp_path, name):
    folder = tmp_path / "my data (2)"
    folder.mkdir()
    path = write_features(folder / name)
    code, _, err = command(f"out={folder}/out", "data=features", f"data.path={path}", *SMALL)
    assert (code, err) == (0, "")
    assert list((folder / "out" / "runs").glob("*/run.json"))


def test_any_name_of_a_data_set_makes_a_folder(command, tmp_path):
    path = write_features(tmp_path / "f.npz")
    name = "../my CLIP/features " + "x" * 300
    code, _, err = command(f"out={tmp_path}/out", "data=features", f"data.path={path}", f'data.name="{name}"', *SMALL)
    assert (code, err) == (0, "")
    [folder] = [entry for entry in (tmp_path / "out" / "runs").iterdir() if entry.name != ".locks"]
    assert folder.name.startswith("fedran-.._my_CLIP_features_xxx")


def test_a_tilde_is_the_home_folder(command, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command("-m", "out=~/results", *SMALL, "seed=0,1")[0] == 0
    assert sorted(entry.name for entry in (tmp_path / "results").iterdir()) == ["runs", "sweeps"]


def test_a_full_disk_is_told_not_traced(command, tmp_path, monkeypatch):
    import errno

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr("fcl_bench.execution.model_file.save_file", full)
    code, _, err = command(f"out={tmp_path}", *SMALL)
    assert code == 2
    assert err == (
        "fcl-bench: error: writing failed, model.safetensors: No space left on device"
        " (out=FOLDER and cache.dir=FOLDER with room to write)\n"
    )


def test_iid_runs_do_not_claim_a_beta(command, tmp_path):
    import json

    for beta in (0.1, 5):
        code, out, _ = command(f"out={tmp_path}", *SMALL, "partition=iid", f"beta={beta}")
        assert code == 0
        assert ", iid, seed 0" in out
    [record] = (tmp_path / "runs").glob("*/run.json")  # beta has no part in the result
    content = json.loads(record.read_text())
    assert (content["partition"], content["beta"]) == ("iid", None)


def test_a_read_only_output_folder_is_told(command, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):  # root may write anywhere: a folder below a file can't be made by anyone
        folder.rmdir()
        folder.write_text("")
    code, _, err = command(f"out={folder}", *SMALL)
    assert code == 2
    assert f"out={folder}" in err
    assert err.count("\n") == 1


def test_a_run_prints_its_tables_and_its_folder(command, tmp_path):
    code, out, err = command(f"out={tmp_path}", *SMALL)
    assert (code, err) == (0, "")
    for title in (
        "accuracy on all classes seen",
        "A_T",
        "forgetting",
        "upload, busiest client and task",
        "run folder: ",
    ):
        assert title in out
    assert "runtime." not in out
    folder = Path(out.split("run folder: ")[1].splitlines()[0])
    assert (folder / "run.json").exists()
    code, out, _ = command(f"out={tmp_path}", *SMALL, "details=true")
    assert code == 0
    assert "complete already" in out
    for key in ("metrics.retention", "communication.up_total_bytes", "runtime.peak_memory_bytes"):
        assert key in out
    assert "details" not in (folder / "config.yaml").read_text()


@pytest.mark.slow
def test_one_bad_job_does_not_stop_a_sweep_and_the_exit_code_tells(command, tmp_path):
    code, out, err = command("-m", f"out={tmp_path}", *SMALL, "beta=0.5,-1", "seed=0,1")
    assert code == 2
    assert err.count("beta=-1.0 is out of range") == 2
    assert "2 of 4 runs failed" in err
    assert out.count(" of 4 done in ") == 2
    assert len(list((tmp_path / "runs").glob("*/run.json"))) == 2


@pytest.mark.slow
def test_a_sweep_over_methods_may_fix_a_knob_that_the_default_method_lacks(command, tmp_path):
    small = ("tasks=2", "clients=2", "method.M=32")
    code, out, err = command("-m", f"out={tmp_path}", "method=stsa,stsa_e", "method.gamma=5", *small)
    assert (code, err) == (0, "")
    assert out.count(" of 2 done in ") == 2
    code, out, err = command("-m", f"out={tmp_path}", "method=stsa,centralised_ridge", "method.gamma=5", *small)
    assert code == 2
    assert "run 2 of 2 failed: method=centralised_ridge: unknown key method.gamma: it belongs to " in err
    assert "(method=centralised_ridge has M, activation, ridge, scale_scores)" in err
    assert "run 1 of 2 was complete already: method=stsa: A_avg " in out  # the other one is not stopped by it


def test_a_bug_in_a_sweep_outranks_wrong_input(command, tmp_path, monkeypatch):
    from fcl_bench.engine.loop import Federation

    def broken(self, task):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Federation, "_learn", broken)
    assert command("-m", f"out={tmp_path}", *SMALL, "beta=0.5,-1")[0] == 1


@pytest.mark.slow
def test_many_processes_may_probe_one_folder(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from fcl_bench.files import writable

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: writable("out", tmp_path), range(2000))) == {tmp_path}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    line = f"{sys.executable} -m fcl_bench out={tmp_path} {' '.join(SMALL)} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stdout.strip() == "0"
    assert "Traceback" not in done.stderr


def test_a_pipe_that_breaks_before_a_run_is_complete_is_a_failure(command, tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr("fcl_bench.execution.run.run", broken)
    assert command(f"out={tmp_path}", *SMALL)[0] == 1


def test_a_sweep_may_have_its_option_anywhere(command, tmp_path):
    code, out, _ = command(f"out={tmp_path}", *SMALL, "-m", "seed=0,1")
    assert code == 0
    assert out.count(" of 2 done in ") == 2


def test_a_bug_shows_its_traceback_and_exits_1(command, tmp_path, monkeypatch):
    from fcl_bench.engine.loop import Federation

    def broken(self, task):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Federation, "_learn", broken)
    code, _, err = command(f"out={tmp_path}", *SMALL)
    assert code == 1
    assert "Traceback" in err
    assert "a bug" in err


def test_an_interrupt_exits_130_and_the_same_command_goes_on(command, tmp_path, monkeypatch):
    with interrupt_at(1, monkeypatch):
        code, _, err = command(f"out={tmp_path}", *SMALL)
    assert code == 130
    assert "interrupted" in err
    code, out, _ = command(f"out={tmp_path}", *SMALL)
    assert code == 0
    assert "going on after task 1 of 2" in out
    with interrupt_at(1, monkeypatch):
        _, _, err = command(f"out={tmp_path}", *SMALL, "force=true")
    assert err == "fcl-bench: interrupted (the same command without force=true goes on where it stopped)\n"


@pytest.mark.slow
def test_peak_memory_is_reset_between_jobs(command, tmp_path):
    """A large first run must not be the peak of the small one after it."""
    import json

    import torch

    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory can only be reset on Linux")
    torch.ones(250_000_000, dtype=torch.float64).sum()  # 2 GB, freed at once
    status = Path("/proc/self/status").read_text()
    resident = 1024 * int(status.split("VmRSS:")[1].split()[0])
    command(f"out={tmp_path}", *SMALL)
    [record] = (tmp_path / "runs").glob("*/run.json")
    assert json.loads(record.read_text())["runtime"]["peak_memory_bytes"] < resident + 1e9


@pytest.mark.slow_cases("--help", "-h")
@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_help_and_version_wait_for_no_library(option):
    program = (
        f"import sys; sys.argv = ['fcl-bench', {option!r}]\n"
        "from fcl_bench.cli.app import main\n"
        "assert main() == 0\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "hydra"} & set(done.stderr.split())


def test_help_lists_every_choice_with_a_line(command):
    code, out, _ = command("--help")
    assert code == 0
    from fcl_bench.composition import config_dir

    for file in config_dir().glob("*/[!_]*.yaml"):
        section = re.split(r"\n  (?=\S)", out.split(f"\n  {file.parent.name}\n", 1)[1])[0]
        [line] = [line for line in section.splitlines() if line.split()[:1] == [file.stem] or f"* {file.stem} " in line]
        assert len(line.split(file.stem, 1)[1].strip()) > 10, file
    for key in ("seed", "beta", "clients", "tasks", "device", "dtype", "out", "force"):
        assert f"\n  {key}=" in out


#: Of each program the words after which `--help` says something of its own.
HELPS = {
    "fcl-bench": [
        "",
        *COMMANDS,
        *(f"runs {name}" for name in ("list", "compare", "export", "clean", "verify", "sign")),
    ],
    "fcl-bench-data": ["", "list", "prepare"],
    "fcl-bench-node": [""],
    "fcl-tables": [""],
}


@pytest.mark.parametrize(("program", "words"), [(name, words) for name, found in HELPS.items() for words in found])
def test_help_fits_80_columns(program, words, capsys, monkeypatch):
    """In a pipe, where nobody knows how wide the reader's terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "argv", [program, *words.split(), "--help"])
    [script] = entry_points(group="console_scripts", name=program)
    with suppress(SystemExit):  # argparse's
        script.load()()
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) > 3
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_the_data_of_a_run_are_read_and_hashed_once(tmp_path, feature_file, command, monkeypatch):
    import numpy as np

    from fcl_bench.data.sources import array_files as source
    from fcl_bench.data.sources import base

    done: dict[str, int] = {"read": 0, "hashed": 0}

    def counted(what: str, call):
        def counting(*arguments, **keywords):
            done[what] += 1
            return call(*arguments, **keywords)

        return counting

    class Digest:
        def __init__(self, content: bytes = b"") -> None:
            self.inner = content_hash()
            self.hexdigest = self.inner.hexdigest
            self.update(content)

        def update(self, data) -> None:
            done["hashed"] += memoryview(data).nbytes
            self.inner.update(data)

    content_hash = base.content_hash
    monkeypatch.setattr(np, "load", counted("read", np.load))
    for module in (base, source):
        monkeypatch.setattr(module, "content_hash", Digest)
    assert command(f"out={tmp_path}", "data=features", f"data.path={feature_file}", *SMALL)[0] == 0
    assert done["read"] == 1
    with np.load(feature_file) as file:
        features = sum(file[name].nbytes for name in ("x_train", "x_test"))
        labels = sum(file[name].size * 8 for name in ("y_train", "y_test"))
    # Labels twice: the plan asks for the data set's fingerprint, and the record does again.
    assert features <= done["hashed"] <= features + 2 * labels + 1000


def test_what_hydra_resolves_can_be_a_value(tmp_path, command):
    code, _, err = command(f"out={tmp_path}/${{hydra:job.name}}", *SMALL)
    assert (code, err) == (0, "")
    assert len(list((tmp_path / "app" / "runs").glob("*/run.json"))) == 1


def test_the_module_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fcl_bench", "method=fedrn"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.startswith("fcl-bench: error: method=fedrn")
    assert list(tmp_path.iterdir()) == []
