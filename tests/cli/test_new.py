"""`fcl-bench new`: what it writes runs as it stands and counts as built in; what it refuses leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fcl_bench.cli.new import KINDS, package
from fcl_bench.composition import choices_of
from tests.conftest import REPOSITORY
from tests.own_packages import installed_package, write_package

#: What makes a run with each kind short.
SHORT = {
    "method": ("method.M=16",),
    "data": ("method=fedncm",),
    "split": ("method=fedncm",),
    "partition": ("method=fedncm",),
    "backbone": ("method=fedncm", "backbone.width=4"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_is_a_choice_like_those_of_fcl_bench(kind, tmp_path, command):
    name = f"written_{kind}"  # modules stay imported
    code, out, err = command("new", kind, name, "--in", tmp_path)
    assert (code, err) == (0, "")
    folder = tmp_path / name
    written = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert written == package(kind, name)
    assert all(path in out for path in written)
    assert os.listdir(tmp_path) == [name]
    with installed_package(folder, name):
        assert name in choices_of(kind)
        assert hasattr(import_module(f"{name}.{kind}"), f"Written{kind.capitalize()}"), "what it imports is there"
        code, out, err = command("show", f"{kind}={name}")
        assert (code, err) == (0, "")
        assert f"fcl-bench {kind}={name}" in out
        code, _, err = command(f"{kind}=writen_{kind}")
        assert code == 2
        assert f"did you mean {name}?" in err
    assert name not in choices_of(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_alone_and_in_a_sweep(kind, tmp_path, command):
    name = f"run_{kind}"
    write_package(tmp_path, kind, name)
    with installed_package(tmp_path, name):
        typed = (f"{kind}={name}", *SHORT[kind], "tasks=2", "clients=2", f"out={tmp_path / 'out'}")
        code, _, err = command(*typed)
        assert (code, err) == (0, "")
        assert command("-m", *typed)[0] == 0
    [run] = (tmp_path / "out" / "runs").glob("*/run.json")
    assert name in run.parent.name or kind in ("split", "partition")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_tests_that_it_writes_pass(kind, tmp_path):
    name = f"tested_{kind}"
    write_package(tmp_path, kind, name)
    with installed_package(tmp_path, name):
        paths = [str(tmp_path), str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", str(tmp_path / "tests")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_a_package_that_cannot_be_imported_breaks_only_its_own_runs(tmp_path, command):
    write_package(tmp_path, "data", "broken_data")
    (tmp_path / "broken_data" / "data.py").write_text("import nothing_like_it\n")
    with installed_package(tmp_path, "broken_data"):
        assert command("method=fedncm", "--cfg", "job")[0] == 0
        code, _, err = command("data=broken_data", f"out={tmp_path / 'out'}")
    assert (code, err.count("\n")) == (2, 1)
    assert "data._target_=broken_data.data.BrokenData cannot be imported" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "the following arguments are required: KIND, NAME"),
        (("metod", "mine"), "new metod: there is no such kind (did you mean method?"),
        (("method", "MyMethod"), "MyMethod is no name for a package (small letters, such as my_method)"),
        (("method", "3x"), "3x is no name for a package (small letters, such as x)"),
        (("method", "../x"), "../x is no name for a package"),
        (("method", ""), "an empty name is no name for a package (small letters, such as my_method)"),
        (("method", "fedavg"), "method=fedavg is there already (a name of its own, such as my_fedavg)"),
        (("method", "finetune"), "method=finetune is there already"),
        (("split", "class"), "class is a word of Python's or of fcl-bench's"),
        (("split", "null"), "null is a word of Python's or of fcl-bench's"),
        (("data", "off"), "off is a word of Python's or of fcl-bench's"),
        (("data", "hydra_plugins"), "hydra_plugins is a word of Python's or of fcl-bench's"),
        (("data", "dataset"), "Dataset is a class that the data needs (a name of its own, such as my_dataset)"),
        (("method", "message"), "Message is a class that the method needs"),
        (("data", "torch"), "torch is an installed package (a name of its own, such as my_torch)"),
        (("data", "taken"), "is there already (another name, or --in FOLDER)"),
        (("data", "mine", "--in", "nowhere"), "--in nowhere is no folder"),
        (("data", "mine", "--in", "/proc"), "/proc/mine cannot be made: "),
    ],
)
def test_a_wrong_name_or_folder_is_told_in_one_line_and_nothing_is_written(
    arguments, told, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    code, out, err = command("new", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert os.listdir() == ["taken"]


def test_the_code_that_it_writes_is_formatted_like_ours(tmp_path):
    for kind in KINDS:
        write_package(tmp_path / kind, kind, "my_name")
        assert import_module("ast").parse((tmp_path / kind / "my_name" / f"{kind}.py").read_text())
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    config = ["--config", str(REPOSITORY / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *words, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
