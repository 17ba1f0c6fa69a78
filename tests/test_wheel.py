"""The installed wheel works from any directory, its configuration inside."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the built wheel's content, as pip installs it; dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder / "site"),
    ]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return wheel, folder / "site"


def call(site, cwd, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(arguments, capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.mark.slow
def test_the_wheel_holds_every_yaml(installed):
    wheel, _ = installed
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in (REPOSITORY / "conf").rglob("*.yaml"):
        assert f"fcl_bench/conf/{file.relative_to(REPOSITORY / 'conf')}" in names


def test_the_wheel_holds_every_papers_folder(installed):
    wheel, _ = installed
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [file.relative_to(REPOSITORY / "src") for file in (REPOSITORY / "src/fcl_bench/papers").glob("*/*.*")]
    assert {str(file) for file in files if "__pycache__" not in file.parts} <= names
    assert "fcl_bench/papers/afcl/printed.csv" in names


def test_the_wheel_says_that_it_is_typed(installed):
    wheel, _ = installed
    assert "fcl_bench/py.typed" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.slow
def test_the_installed_command_runs_elsewhere(installed, tmp_path):
    _, site = installed
    where = call(site, tmp_path, sys.executable, "-c", "import fcl_bench; print(fcl_bench.__file__)")
    assert where.stdout.startswith(str(site))
    script = str(site / "bin" / "fcl-bench")
    done = call(site, tmp_path, sys.executable, script, "method.M=32", "method.rank=8", "tasks=2")
    assert done.returncode == 0, done.stderr
    assert "run folder: outputs/runs/fedran-digits-pixels-" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["outputs"]
    assert call(site, tmp_path, sys.executable, script, "--help").returncode == 0


@pytest.mark.slow
def test_the_installed_command_knows_the_presets(installed, tmp_path):
    _, site = installed
    script = str(site / "bin" / "fcl-bench")
    done = call(site, tmp_path, sys.executable, script, "experiment=afl_table1", "profile=quick", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "_target_: fcl_bench.methods.closed_form.afl.AFL" in done.stdout
