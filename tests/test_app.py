"""The command as a user meets it: wrong input, help, sweeps, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import write_features

SMALL = ("method.M=32", "method.rank=8", "tasks=2", "clients=2")


@pytest.fixture
def inputs(tmp_path):
    """Files that a user might point at by mistake; the names stand in the table below."""
    (tmp_path / "text.npz").write_text("hello\n")
    write_features(tmp_path / "good.npz")
    write_features(tmp_path / "mismatch.npz", y_train=np.zeros(7, dtype=int))
    write_features(tmp_path / "nan.npz", x_test=np.full((60, 12), np.nan))
    write_features(tmp_path / "unseen.npz", y_test=np.full(60, 3))
    write_features(tmp_path / "negative.npz", y_train=-np.ones(240, dtype=int))
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "weights.safetensors").write_bytes(b"not weights")
    (tmp_path / "file").write_text("a file, not a folder")
    for side in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "images" / side / name).mkdir(parents=True)
            for number in range(4):
                pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / side / name / f"{number}.png")
    (tmp_path / "images" / "train" / "dog" / "2.png").write_bytes(b"not an image")
    return tmp_path


#: What was typed ({} is the folder of `inputs`) -> what the one line must hold.
BAD_INPUT = [
    ("methd=fedran", "unknown key methd (did you mean method?"),
    ("method=fedrn", "method=fedrn is not known (did you mean fedran?"),
    ("data=cifar10", "data=cifar10 is not known (did you mean cifar100?"),
    ("backbone=resnet", "backbone=resnet is not known (did you mean resnet18?"),
    ("split=domain", "split=domain is not known (choices: class_incremental"),
    ("partition=dirichlt", "did you mean dirichlet?"),
    ("method.rnk=5", "unknown key method.rnk (did you mean method.rank"),
    ("+method.rnk=5", "unknown key method.rnk"),
    ("+sed=1", "unknown key sed (did you mean seed"),
    ("+wire.type=float32", "unknown key wire.type"),
    ("wire.type=float32", "unknown key wire.type (did you mean wire.dtype"),
    ("fedran", "fedran is not key=value"),
    ("--rank 5", "unknown option --rank (keys are written rank=VALUE"),
    ("--cfg", "--cfg needs a value"),
    ("method.rank=[1", "method.rank"),
    ("seed=1.5", "seed=1.5 has the wrong type (an integer)"),
    ("seed=0,1", "seed=0,1 names several values (-m runs each"),
    ("method=null", "cannot be composed"),
    ("backbone=resnet18 backbone.model_args={{a:1}}", "+backbone.model_args.KEY=VALUE"),
    ("device=cuda:99999999999999", "is not known"),
    ("method.M=100000000000", "GiB for the projection"),
    ("cache.dir=", "cache.dir is empty"),
    ("backbone=resnet18 backbone.transform.std=[0,1,1]", "is out of range"),
    ("-m out={}/file", "Not a directory"),
    ("seed=-1", "seed=-1 is out of range"),
    ("seed=null", "seed=null has the wrong type"),
    ("clients=0", "clients=0 is out of range (an integer of at least 1)"),
    ("clients=-3", "clients=-3 is out of range"),
    ("clients=many", "clients=many has the wrong type (an integer)"),
    ("tasks=0", "tasks=0 is out of range"),
    ("tasks=11", "tasks=11 is more than the 10 classes (1 to 10)"),
    ("beta=0", "beta=0.0 is out of range (a finite number above 0)"),
    ("beta=-0.5", "beta=-0.5 is out of range"),
    ("beta=nan", "beta=nan is out of range"),
    ("beta=inf", "beta=inf is out of range"),
    ("beta=", "beta= has the wrong type (a number)"),
    ("force=maybe", "force=maybe has the wrong type (true or false)"),
    ("dtype=float16", "dtype=float16 is not known"),
    ("wire.dtype=int8", "wire.dtype=int8 is not known"),
    ("device=gpu", "device=gpu is not known (auto, cpu, cuda or cuda:N)"),
    ("device=cuda:99", "device=cuda:99 is not there"),
    ("out={}/file", "cannot be written"),
    ("out={}/file/below", "cannot be written"),
    ("method.rank=0", "method.rank=0 is out of range"),
    ("method.rank=4096", "method.rank=4096 is more than the 2048 random features"),
    ("method.M=0", "method.M=0 is out of range"),
    ("method.M=null", "method.rank=512 is more than the 64 features"),
    ("method.M=2048.5", "method.M=2048.5 has the wrong type (an integer or null)"),
    ("method.ridge=0", "method.ridge=0.0 is out of range"),
    ("method.ridge=-1", "method.ridge=-1.0 is out of range"),
    ("method.merge=parallel", "method.merge=parallel is not known (choices: joint, sequential, tree"),
    ("method.budget_bytes=0", "method.budget_bytes=0 does not hold one direction and 2 class sums (at least 24580"),
    ("method.budget_bytes=-1", "at least 24580 with M=2048 and wire.dtype=float32"),
    ("method.budget_bytes=24579", "at least 24580"),
    ("method.complement=zero", "method.complement=zero is not known"),
    ("method.tau=1.5", "method.tau=1.5 is out of range (a cosine, -1 to 1"),
    ("method.ssl=perhaps", "method.ssl=perhaps has the wrong type (true or false)"),
    ("label_rate=0", "label_rate=0.0 is out of range (above 0, at most 1)"),
    ("label_rate=1.1", "label_rate=1.1 is out of range"),
    ("label_rate=nan", "label_rate=nan is out of range"),
    ("wire.gram=half", "wire.gram=half is not known (choices: full, packed"),
    ("wire.columns=all", "wire.columns=all is not known (choices: held, task"),
    ("wire.projection=none", "wire.projection=none is not known (choices: matrix, seed"),
    ("method=stsae", "did you mean stsa_e or stsa?"),
    ("method=stsa method.gamma=-1", "method.gamma=-1.0 is out of range (a finite number, 0 or more)"),
    ("method=stsa method.rank=5", "unknown key method.rank"),
    ("method=stsa method.M=200000", "GiB for 4 matrices of 200000 x 200000"),
    ("method=stsa_e method.dummy_clients=0", "method.dummy_clients=0 is out of range"),
    (
        "method=stsa_e method.estimator=biased",
        "method.estimator=biased is not known (did you mean unbiased? choices: paper, unbiased",
    ),
    ("method=afl method.ri=maybe", "method.ri=maybe has the wrong type (true or false)"),
    ("method=afl method.gamma=inf", "method.gamma=inf is out of range"),
    ("method=afcl method.ridge=-1", "method.ridge=-1.0 is out of range (a finite number, 0 or more)"),
    ("method=centred_sketch method.rank=-1", "method.rank=-1 is out of range (an integer of at least 0)"),
    ("method=centred_sketch method.rank=4096", "method.rank=4096 is more than the 2048 features"),
    ("method=centred_sketch method.ridge=0", "method.ridge=0.0 is out of range"),
    ("method=joint method.ridge=-2", "method.ridge=-2.0 is out of range"),
    ("wire=packed", "wire=packed has the wrong type (keys of its own: dtype, gram, columns, projection"),
    ("method=stsa method.gamma=null", "method.gamma=null has the wrong type (a number"),
    ("method=stsa_e method.dummy_clients=1000000000", "GiB for one upload"),
    ("label_rate=1e-9", "label_rate=1e-09 leaves no label"),
    ("method._target_=nowhere.Nothing", "method._target_=nowhere.Nothing cannot be imported"),
    ("method._target_=pathlib.Path", "is not a"),
    ("method._target_=pathlib.Paht", "is not a"),
    ("method.name=stsa", "unknown key method.name"),
    ("split.first=0", "split.first=0 is out of range"),
    ("split.first=7", "split.first=7 leaves 3 classes for 4 further tasks (at most 6"),
    ("split.shuffle=perhaps", "split.shuffle=perhaps has the wrong type"),
    ("partition.min_size=-1", "partition.min_size=-1 is out of range"),
    ("partition.min_size=100", "partition.min_size=100 for clients=5 asks for 500 samples"),
    ("partition=shards partition.shards=0", "partition.shards=0 is out of range"),
    ("clients=1000", "partition.min_size=0 at most"),
    ("data=features", "data=features needs data.path"),
    ("data=features data.path={}/none.npz", "does not exist"),
    ("data=features data.path={}/text.npz", "is not a readable .npz file"),
    ("data=features data.path={}/mismatch.npz", "x_train has 240 rows and y_train has 7 labels"),
    ("data=features data.path={}/nan.npz", "x_test holds NaN or infinity"),
    ("data=features data.path={}/unseen.npz", "no test sample for 5 of 6 classes"),
    ("data=features data.path={}/negative.npz", "y_train holds the label -1"),
    ("data=features data.path={}/good.npz backbone=pixels", "data=features holds features (backbone=identity)"),
    ("data=digits backbone=identity", "backbone=identity needs ready features"),
    ("data=imagefolder", "data=imagefolder needs data.path"),
    ("data=imagefolder data.path={}", "has no train/<class>/ folders"),
    (
        "data=imagefolder data.path={}/images backbone=pixels tasks=2 clients=2",
        "dog/2.png cannot be read: not an image",
    ),
    ("data=cifar100 data.path={}/none", "does not exist"),
    ("backbone=timm", "backbone.name has no value"),
    ("backbone=timm backbone.name=resnt18.tv_in1k", "did you mean resnet18"),
    ("backbone=resnet18 backbone.checkpoint={}/none.pth", "does not exist"),
    ("backbone=resnet18 backbone.checkpoint={}/weights.bin", "is no checkpoint"),
    ("backbone=resnet18 backbone.checkpoint={}/weights.safetensors", "cannot be loaded"),
    ("backbone=resnet18 backbone.precision=float8", "backbone.precision=float8 is not known"),
    ("backbone=resnet18 backbone.transform.size=big", "backbone.transform.size=big has the wrong type"),
    ("backbone=resnet18 backbone.transform.mean=[1,2]", "one per channel: 3"),
    ("backbone=resnet18 backbone.batch_size=0", "backbone.batch_size=0 is out of range"),
    ("backbone.size=0", "backbone.size=0 is out of range"),
    ("cache.enabled=perhaps", "cache.enabled=perhaps has the wrong type"),
]


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("typed", "told"), BAD_INPUT, ids=[typed for typed, _ in BAD_INPUT])
def test_wrong_input_is_one_line_exit_2_and_nothing_written(command, inputs, typed, told):
    arguments = typed.format(inputs).split()
    if not any(argument.startswith("out=") for argument in arguments) and "=" in typed:
        arguments.append(f"out={inputs}/out")
    before = written(inputs)
    code, _, err = command(*arguments)
    assert code == 2
    [line] = err.splitlines()
    assert line.startswith("fcl-bench: error: ")
    assert told in line
    assert line.endswith(")")
    assert {path for path in written(inputs) - before if not path.endswith((".log", ".lock"))} == set()


def test_the_table_of_wrong_input_is_long_enough():
    assert len({typed for typed, _ in BAD_INPUT}) >= 40


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

    monkeypatch.setattr("fcl_bench.report.run_folder.save_file", full)
    code, _, err = command(f"out={tmp_path}", *SMALL)
    assert code == 2
    assert err == (
        "fcl-bench: error: writing failed, model.safetensors: No space left on device"
        " (out=FOLDER and cache.dir=FOLDER with room to write)\n"
    )


def test_an_error_in_the_middle_of_a_run_is_told_once(tmp_path, inputs):
    """In a process of its own, since the log's handlers are the process's."""
    arguments = ["data=imagefolder", f"data.path={inputs}/images", "backbone=pixels", "tasks=2", "clients=2"]
    line = [sys.executable, "-m", "fcl_bench", f"out={tmp_path}/out", *arguments]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("cannot be read") == 1
    assert done.stderr.count("\n") == 1
    assert "cannot be read" not in done.stdout


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
        "All classes seen",
        "Over the stream",
        "Communication",
        "Runtime",
        "A_T",
        "forgetting",
        "run folder: ",
    ):
        assert title in out
    folder = Path(out.split("run folder: ")[1].strip())
    assert (folder / "run.json").exists()
    code, out, _ = command(f"out={tmp_path}", *SMALL)
    assert code == 0
    assert "complete already" in out


def test_one_bad_job_does_not_stop_a_sweep_and_the_exit_code_tells(command, tmp_path):
    code, out, err = command("-m", f"out={tmp_path}", *SMALL, "beta=0.5,-1", "seed=0,1")
    assert code == 2
    assert err.count("beta=-1.0 is out of range") == 2
    assert "2 of 4 runs failed" in err
    assert out.count("run folder: ") == 2
    assert len(list((tmp_path / "runs").glob("*/run.json"))) == 2


def test_a_sweep_over_methods_may_fix_a_knob_that_the_default_method_lacks(command, tmp_path):
    small = ("tasks=2", "clients=2", "method.M=32")
    code, out, err = command("-m", f"out={tmp_path}", "method=stsa,stsa_e", "method.gamma=5", *small)
    assert (code, err) == (0, "")
    assert out.count("run folder: ") == 2
    code, _, err = command("-m", f"out={tmp_path}", "method=stsa,joint", "method.gamma=5", *small)
    assert code == 2
    assert "unknown key method.gamma of method=joint (" in err
    assert err.rstrip().endswith("choices: method.M, method.ridge)")


def test_a_bug_in_a_sweep_outranks_wrong_input(command, tmp_path, monkeypatch):
    from fcl_bench.federation.engine import Federation

    def broken(self, task):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Federation, "_learn", broken)
    assert command("-m", f"out={tmp_path}", *SMALL, "beta=0.5,-1")[0] == 1


def test_many_processes_may_probe_one_folder(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from fcl_bench.run import _writable

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: _writable("out", tmp_path), range(2000))) == {tmp_path}
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    line = f"{sys.executable} -m fcl_bench out={tmp_path} {' '.join(SMALL)} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stdout.strip() == "0"
    assert "Traceback" not in done.stderr


def test_a_sweep_may_have_its_option_anywhere(command, tmp_path):
    code, out, _ = command(f"out={tmp_path}", *SMALL, "-m", "seed=0,1")
    assert code == 0
    assert out.count("run folder: ") == 2


def test_a_bug_shows_its_traceback_and_exits_1(command, tmp_path, monkeypatch):
    from fcl_bench.federation.engine import Federation

    def broken(self, task):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Federation, "_learn", broken)
    code, _, err = command(f"out={tmp_path}", *SMALL)
    assert code == 1
    assert "Traceback" in err
    assert "a bug" in err


def test_an_interrupt_exits_130_and_the_same_command_goes_on(command, tmp_path, monkeypatch):
    from fcl_bench.federation.engine import Federation

    evaluate = Federation._evaluate

    def interrupted(self, task):
        if task.index == 1:
            raise KeyboardInterrupt
        return evaluate(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "_evaluate", interrupted)
        code, _, err = command(f"out={tmp_path}", *SMALL)
    assert code == 130
    assert "interrupted" in err
    code, out, _ = command(f"out={tmp_path}", *SMALL)
    assert code == 0
    assert "going on after task 1 of 2" in out


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


def without_importing(modules: set[str], *arguments: str) -> str:
    """What the command prints in a process of its own, which must not import any of `modules`."""
    program = (
        f"import sys; sys.argv = {['fcl-bench', *arguments]!r}\n"
        "from fcl_bench.app import main\n"
        "code = main()\n"
        f"found = {modules!r} & set(sys.modules)\n"
        "assert not found, found\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_lists_every_choice_with_a_line_and_imports_no_torch():
    out = without_importing({"torch", "numpy", "hydra", "timm", "pandas"}, "--help")
    from fcl_bench.config import config_dir

    for file in config_dir().glob("*/*.yaml"):
        [line] = [line for line in out.splitlines() if line.split()[:1] == [file.stem] or f"* {file.stem} " in line]
        assert len(line.split(file.stem, 1)[1].strip()) > 10, file
    for key in ("seed:", "beta:", "clients:", "tasks:", "device:", "dtype:", "out:", "force:"):
        assert key in out


def test_a_run_without_a_network_imports_neither_timm_nor_pandas(tmp_path, feature_file):
    features = ("data=features", f"data.path={feature_file}")
    without_importing({"timm", "torchvision", "pandas", "datasets"}, f"out={tmp_path}", *features, *SMALL)


def test_the_module_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fcl_bench", "method=fedrn"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.startswith("fcl-bench: error: method=fedrn")
    assert list(tmp_path.iterdir()) == []
