"""Wrong input as a user types it: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import write_features


@pytest.fixture
def inputs(tmp_path):
    """Files that a user might point at by mistake; the names stand in the table below."""
    (tmp_path / "text.npz").write_text("hello\n")
    write_features(tmp_path / "good.npz")
    write_features(tmp_path / "mismatch.npz", y_train=np.zeros(7, dtype=int))
    write_features(tmp_path / "nan.npz", x_test=np.full((60, 12), np.nan))
    write_features(tmp_path / "unseen.npz", y_test=np.full(60, 4))
    write_features(tmp_path / "negative.npz", y_train=-np.ones(240, dtype=int))
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "weights.safetensors").write_bytes(b"not weights")
    (tmp_path / "file").write_text("a file, not a folder")
    (tmp_path / "own" / "method").mkdir(parents=True)
    (tmp_path / "own" / "method" / "ours.yaml").write_text("defaults:\n  - stsa\n\nours: 1\n")
    (tmp_path / "broken" / "method").mkdir(parents=True)
    (tmp_path / "broken" / "method" / "tab.yaml").write_text("M: 1\n\tridge: 2\n")
    (tmp_path / "broken" / "method" / "twice.yaml").write_text("M: 1\nM: 2\n")
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
    ("methd=fedran", "unknown key methd (did you mean method or"),
    ("method=fedrn", "method=fedrn is not known (did you mean fedran"),
    ("data=cifar11", "data=cifar11 is not known (did you mean cifar10 or cifar100?"),
    ("backbone=resnet", "backbone=resnet is not known (did you mean resnet18"),
    ("experiment/preset=[sketch_half]", "experiment/preset without an experiment that has presets (experiment=NAME"),
    ("split=domain", "split=domain is not known (did you mean domain_incremental? choices: asynchronous,"),
    ("partition=dirichlt", "did you mean dirichlet or dirichlet_power_law"),
    ("dp=8", "unknown key dp (did you mean noise"),
    ("method.remainder=gaussian", "did you mean method.mix? gaussian_sketch has it; method=fedran does not"),
    ("secagg=true", "unknown key secagg (did you mean secure?"),
    ("method.rnk=5", "unknown key method.rnk (did you mean method.rank"),
    ("+method.rnk=5", "unknown key method.rnk"),
    ("+method.rank=5", "+method.rank: the configuration has this key already (method.rank=VALUE, without the +)"),
    ("+sed=1", "unknown key sed (did you mean seed"),
    ("+wire.type=float32", "unknown key wire.type"),
    ("wire.type=float32", "unknown key wire.type (did you mean wire.dtype"),
    ("fedran", "fedran is not key=value (did you mean method=fedran?)"),
    ("xyzzy", "xyzzy is not key=value (such as method=fedran; "),
    ("--rank 5", "unknown option --rank (keys are written without dashes: method.rank=5)"),
    ("--seed 3", "unknown option --seed (keys are written without dashes: seed=3)"),
    ("--local-epochs=2", "keys are written without dashes: method.training.epochs=2)"),
    ("--xyzzy 3", "unknown option --xyzzy (keys are written xyzzy=VALUE; choices: "),
    ("seed 3", "seed is not key=value (did you mean seed=3?)"),
    ("shwo method", "shwo is not key=value (did you mean show?)"),
    ("lr=0.1", "unknown key lr (did you mean method.training.lr? "),
    ("lr=0.1", " more have it; method=fedran does not)"),
    ("transport=tree transport.rounds=open", "unknown key transport.rounds: it belongs to flower, in_process"),
    ("method=fedavg method.lr=1", "unknown key method.lr (did you mean method.training.lr or method.gaussian.lr?)"),
    (
        "method=fedavg backbone=tiny epochs=3",
        "unknown key epochs (did you mean method.training.epochs or method.gaussian.ep",
    ),
    ("alpha=0.3", "unknown key alpha (did you mean beta?)"),
    ("method=feddyn alpha=0.3", "unknown key alpha (did you mean beta or method.alpha?)"),
    ("dataset=cifar10", "unknown key dataset (did you mean data?)"),
    (
        "method=afl method.rank=3",
        "unknown key method.rank: it belongs to centred_sketch, fedran, gaussian_sketch, lorm, pilora (method=afl ",
    ),
    # Choices that another one brings.
    ("experiment=stsa_table1 method.rank=3", " (method=stsa has M, "),
    ("data=sites partition.min_size=0", " (partition=iid has no keys)"),
    ("data=cifar100 backbone.width=3", " (backbone=resnet18 has name, "),
    ("profile=quick backbone.pretrained=true", " (backbone=tiny has width, "),
    ("method=stsa method.training.lr=1", " (method=stsa has M, "),
    ("data.path={}/good.npz", "(did you mean data=features data.path="),
    ("data=cifar100 data.path={}/good.npz", "is an .npz file, and data=cifar100 reads a folder"),
    ("show method=fedrn", "method=fedrn is not known (did you mean fedran"),
    ("show nothing", "show nothing: there is no such group or key"),
    ("show stsa", "show stsa: there is no such group or key (did you mean show method=stsa?)"),
    ("show rank", "show rank: there is no such group or key (did you mean show method.rank?)"),
    ("method=STSA", "method=STSA is not known (did you mean stsa? one of "),
    ("method=FedAvg", "method=FedAvg is not known (did you mean fedavg? one of "),
    ("--cfg", "--cfg needs a value (choices: all, hydra, job)"),
    ("--cfg jobs", "--cfg=jobs is not known (did you mean job? choices: all, hydra, job)"),
    ("--config-dir", "--config-dir needs a value (such as --config-dir VALUE)"),
    ("--config-dir {}/broken method=tab", "broken/method/tab.yaml, line 2, column 1: found character"),
    ("--config-dir {}/own method=ours method.rank=3", " (method=ours has M, activation, gamma, scale_scores, ours)"),
    ("--config-dir={}/own method=ours method.our=3", "unknown key method.our (did you mean method.ours or "),
    (
        "--config-dir {}/broken method=twice",
        "broken/method/twice.yaml, line 2, column 1: found duplicate key M (a YAML",
    ),
    ("--config-dir {}/none method=afl", "/none is not available. (--config-dir FOLDER, a folder with choices)"),
    ("hydra.searchpath=[file://{}/own] method=afl", "hydra.searchpath is a key of Hydra's that fcl-bench sets itself"),
    # Two wrong words in one command: the first that Hydra finds.
    ("methd=afl lr=1", "unknown key methd (did you mean method or "),
    (
        "method=afl method.rank=3 beta=1 epochs=3",
        "M, activation, gamma, ri, aggregation, upload, ridge, scale_scores)",
    ),
    ("method=fedrn data=cifar11", "data=cifar11 is not known (did you mean cifar10"),
    ("-m method=stsa,afl method.rank=3 epochs=3", "unknown key "),
    # Folders with choices of one's own, for every command.
    ("show --config-dir", "--config-dir needs a value (such as --config-dir VALUE)"),
    ("show method=tab --config-dir={}/broken", "broken/method/tab.yaml, line 2, column 1: found a tab"),
    ("show method=ours -cd {}/none", "/none is not available. (--config-dir FOLDER"),
    ("tune --config-dir {}/none M=1,2", "/none is not available. (--config-dir FOLDER"),
    ("--config-dir {}/broken lr=1", "broken/method/tab.yaml, line 2, column 1: found a tab"),
    ("-m out=/proc/none seed=0,1", "out=/proc/none: /proc/none/sweeps/"),
    ("-m hydra/launcher=slrm", "hydra/launcher=slrm is not known (did you mean slurm? choices: parallel, processes"),
    ("method.rank=[1", "method.rank"),
    ("seed=1.5", "seed=1.5 has the wrong type (an integer)"),
    ("seed=0,1", "seed=0,1 names several values (-m runs each"),
    ("method=null", "method=null is no choice of the group method"),
    ("backbone=resnet18 backbone.model_args={{a:1}}", "+backbone.model_args.KEY=VALUE"),
    ("device=cuda:99999999999999", "is not known"),
    ("method.M=100000000000", "GiB for the projection"),
    ("cache.dir=", "cache.dir is empty"),
    ("backbone=resnet18 backbone.transform.std=[0,1,1]", "is out of range"),
    ("-m out={}/file", "Not a directory"),
    ("noise=gaussian noise.multiplier=0 method=afl", " method=afl's uploads (C, W without one_sample) (noise=none"),
    ("seed=-1", "seed=-1 is out of range"),
    ("seed=null", "seed=null has the wrong type"),
    ("clients=0", "clients=0 is out of range (an integer of at least 1)"),
    ("clients=-3", "clients=-3 is out of range"),
    ("clients=many", "clients=many has the wrong type (an integer)"),
    ("tasks=0", "tasks=0 is out of range"),
    ("tasks=11", "tasks=11 is more than the 10 classes (1 to 10)"),
    ("beta=0", "beta=0.0 is out of range (a finite number, 1e-06 or more)"),
    ("beta=-0.5", "beta=-0.5 is out of range"),
    ("beta=nan", "beta=nan is out of range"),
    ("beta=inf", "beta=inf is out of range"),
    ("beta=", "beta= has the wrong type (a number)"),
    ("force=maybe", "force=maybe has the wrong type (true or false)"),
    ("cudnn=fast", "cudnn=fast is not known"),
    ("method=fedntd backbone=tiny backbone.compile=true", "backbone.compile=true: method=fedntd looks into"),
    ("backbone.compile=true", "unknown key backbone.compile"),
    ("dtype=float16", "dtype=float16 is not known"),
    ("wire.dtype=int8", "wire.dtype=int8 is not known"),
    ("device=gpu", "device=gpu is not known (auto, cpu, cuda or cuda:N)"),
    ("device=cuda:99", "device=cuda:99 is not there"),
    ("out={}/file", "cannot be written"),
    ("out={}/file/below", "cannot be written"),
    ("method.rank=0", "method.rank=0 is out of range"),
    ("method.rank=4096", "method.rank=4096 is more than the 2048 features"),
    ("method.M=0", "method.M=0 is out of range"),
    ("method.M=null", "method.rank=512 is more than the 64 features"),
    ("method.M=2048.5", "method.M=2048.5 has the wrong type (an integer or null)"),
    ("method.ridge=0", "method.ridge=0.0 is out of range"),
    ("method.ridge=-1", "method.ridge=-1.0 is out of range"),
    ("method.merge=parallel", "method.merge=parallel is not known (choices: joint, sequential"),
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
    ("method=stsae", "did you mean stsa_e or stsa"),
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
    ("method=centralised_ridge method.ridge=-2", "method.ridge=-2.0 is out of range"),
    ("wire=packed", "wire=packed has the wrong type (keys of its own: dtype, gram, columns, projection"),
    ("method=stsa method.gamma=null", "method.gamma=null has the wrong type (a number"),
    ("method=stsa_e method.dummy_clients=1000000000", "GiB for one upload"),
    ("label_rate=1e-9", "label_rate=1e-09 leaves no label"),
    ("method._target_=nowhere.Nothing", "method._target_=nowhere.Nothing cannot be imported"),
    ("method._target_=pathlib.Path", "is not a"),
    ("help", "help is not key=value (did you mean --help?)"),
    (
        "method._target_=pathlib.Paht",
        "cannot be imported: pathlib has no Paht (module.Class of an installed package, or",
    ),
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
    ("data=features data.path={}/unseen.npz", "no class of the test samples has a training sample"),
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
    ("backbone.size=0", "backbone.size=0 is out of range"),
    ("cache.enabled=perhaps", "cache.enabled=perhaps has the wrong type"),
    ("method=fedavg", "backbone=pixels has nothing to train (backbone=resnet18_cifar"),
    ("adapt=fedavg", "backbone=pixels has nothing to train"),
    ("method=fot backbone=tiny adapt=fedavg", "adapt=fedavg: method=fot trains the network itself"),
    ("method=fedavg backbone=tiny method.training.lr=0", "method.training.lr=0.0 is out of range"),
    ("method=fedavg backbone=tiny method.training.round=5", "did you mean method.training.rounds"),
    ("method=fedavg backbone=tiny method.frozen_stages=9", "at most 4: stage1, stage2, stage3, stage4"),
    ("adapt=fedavg backbone=tiny adapt.training.schedule=step", "adapt.training.milestones=[50,75]"),
    ("drift=-1", "drift=-1 is out of range"),
    ("evaluate_rounds=-1", "evaluate_rounds=-1 is out of range (an integer of at least 0)"),
    ("checkpoint_rounds=0", "checkpoint_rounds=0 is out of range"),
    ("experiment=stsa", "experiment=stsa is not known (did you mean stsa_table5 or stsa_table4"),
    ("data=imagefolder data.path={}/images data.classes=3", "data.classes=3"),
    ("data=imagefolder data.path={}/images data.skip_classes=9", "data.skip_classes=9 leaves none of the"),
]


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("typed", "told"), BAD_INPUT, ids=[typed for typed, _ in BAD_INPUT])
def test_wrong_input_is_one_line_exit_2_and_nothing_written(command, inputs, typed, told):
    arguments = typed.format(inputs).split()
    overrides = "=" in typed and arguments[0] != "show"
    if overrides and not any(argument.startswith("out=") for argument in arguments):
        arguments.append(f"out={inputs}/out")
    before = written(inputs)
    code, _, err = command(*arguments)
    assert code == 2
    [line] = err.splitlines()
    assert line.startswith("fcl-bench: error: ")
    assert told in line
    assert line.endswith(")")
    assert {path for path in written(inputs) - before if not path.endswith((".log", ".lock"))} == set()


def test_a_key_that_no_run_of_a_sweep_has_names_the_first_choice(command, tmp_path):
    code, _, err = command("-m", "method=stsa,afl", "method.rank=3", f"out={tmp_path}")
    assert code == 2
    assert "unknown key method.rank: it belongs to centred_sketch, " in err
    assert "(method=stsa has M, " in err


def test_a_sweep_over_a_choice_of_ones_own_tells_an_unknown_key_in_a_line(command, inputs):
    code, _, err = command("-m", "--config-dir", inputs / "own", "method=ours,afl", "method.our=3", f"out={inputs}/o")
    assert (code, err.count("\n")) == (2, 1)
    assert "unknown key method.our" in err


def test_a_sweep_that_is_refused_leaves_no_folder(command, tmp_path):
    code, out, err = command("-m", "method=stsa,afl", "method.rank=3", f"out={tmp_path / 'out'}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()


def test_a_sweep_that_cannot_be_written_says_what_a_run_says(command, inputs):
    for more in (), ("-m", "seed=0"), ("-m", "seed=0,1"):
        code, out, err = command(*more, f"out={inputs / 'file'}")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"fcl-bench: error: out={inputs / 'file'}: {inputs / 'file'}/")
        assert err.endswith(" cannot be written: Not a directory (a folder that you may write to)\n")


def test_the_table_of_wrong_input_is_long_enough():
    assert len({typed for typed, _ in BAD_INPUT}) >= 40


@pytest.mark.slow
def test_an_error_in_the_middle_of_a_run_is_told_once(tmp_path, inputs):
    """In a process of its own, since the log's handlers are the process's."""
    arguments = ["data=imagefolder", f"data.path={inputs}/images", "backbone=pixels", "tasks=2", "clients=2"]
    line = [sys.executable, "-m", "fcl_bench", f"out={tmp_path}/out", *arguments]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("cannot be read") == 1
    assert done.stderr.count("\n") == 1
    assert "cannot be read" not in done.stdout
