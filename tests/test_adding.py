"""The methods that `fcl-bench new` and docs/how-to/adding.md write out run as they stand there."""

from __future__ import annotations

import json
import re
import textwrap

import pytest

from tests.conftest import REPOSITORY
from tests.own_methods import WRITTEN, own_method

PAGE = (REPOSITORY / "docs" / "how-to" / "adding.md").read_text()
#: Runs of indented lines, blank ones among them.
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n(?:[ \t]*\n)*)+", PAGE, flags=re.M)]
TRAINING = ("backbone=tiny", "backbone.width=4", "method.training.rounds=2", "method.training.epochs=1")


def block_with(text: str) -> str:
    [found] = [block for block in BLOCKS if text in block]
    return found


#: What the YAML of each method of the page takes over.
SHARED = {"my_method": "", "memory": "_gradient"}


@pytest.mark.slow_cases("memory-class MemoryClient(-kept: 20\\nloss_classes: seen\\n-overrides1")
@pytest.mark.parametrize(
    ("name", "code", "knobs", "overrides"),
    [
        ("my_method", "class MyClient(", "M: 2048\nridge: 1.0\n", ("method.M=64",)),
        (
            "memory",
            "class MemoryClient(",
            "kept: 20\nloss_classes: seen\n",
            TRAINING,
        ),
    ],
)
def test_a_method_of_the_page_runs_as_it_stands(name, code, knobs, overrides, tmp_path, monkeypatch, command):
    source = WRITTEN if name == "my_method" else block_with(code)
    own_method(
        tmp_path, monkeypatch, source, re.findall(r"^class (\w+)\(", source, flags=re.M)[-1], knobs, SHARED[name]
    )
    found = {
        "my_method": ("--config-dir", str(tmp_path / "conf")),
        "memory": (f"--config-dir={tmp_path / 'conf'}",),
    }[name]
    code, _, err = command(*found, "method=mine", "tasks=3", "clients=3", f"out={tmp_path / 'out'}", *overrides)
    assert (code, err) == (0, "")
    [file] = (tmp_path / "out" / "runs").glob(f"{name}-*/run.json")
    record = json.loads(file.read_text())
    if name == "my_method":
        assert record["metrics"]["A_T"] > 80
        assert record["client_storage_bytes"] == {}
    else:
        # Twenty images of 3 x 8 x 8 bytes, and their labels, of each of three tasks.
        assert record["client_storage_bytes"] == {"images": 3 * 20 * 192, "labels": 3 * 20 * 8}


#: What stands in the page, what an author wrote in its place -> what the one line must hold after the class's path.
LACKING = {
    "no decorator": ("@dataclass\n", "", " is not a dataclass (a class of the group method with @dataclass)"),
    "no name": (
        '    name: ClassVar[str] = "my_method"\n',
        "",
        " has no name (what docs/how-to/adding.md says of such a class)",
    ),
    "no client half": ("    client_half = MyClient\n", "", " has no client_half ("),
    "no update": ("def update(", "def updates(", " has the client_half MyClient, which has no update ("),
    "no absorb": ("def absorb(", "def absorbed(", " has the server_half MyServer, which has no absorb ("),
    "another's name": (
        '"my_method"',
        '"stsa"',
        " has the name stsa of fcl_bench.methods.closed_form.stsa.STSA (a name",
    ),
}


@pytest.mark.parametrize(("right", "wrong", "told"), LACKING.values(), ids=LACKING)
def test_a_class_that_lacks_something_is_refused_before_anything_is_written(
    right, wrong, told, tmp_path, monkeypatch, command
):
    source = WRITTEN
    assert source.count(right) == 1
    path = own_method(tmp_path, monkeypatch, source.replace(right, wrong), "MyMethod", "M: 64\nridge: 1\n")
    found, out = ("--config-dir", str(tmp_path / "conf")), tmp_path / "out"
    code, _, err = command(*found, "method=mine", f"out={out}")
    assert code == 2
    [line] = err.splitlines()
    assert f"method._target_={path}{told}" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("def x(:", "SyntaxError: invalid syntax"),
        ("x = undefined", "NameError: name 'undefined' is not defined"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_in_one_line(source, told, tmp_path, monkeypatch, command):
    module = f"broken_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = command(f"method._target_={module}.Mine", f"out={tmp_path / 'out'}")
    assert (code, err.count("\n")) == (2, 1)
    assert f"method._target_={module}.Mine cannot be imported: {told}" in err
    assert f"(python -c 'import {module}' shows where)" in err
    assert not (tmp_path / "out").exists()


def test_a_data_set_that_extends_one_of_ours_needs_another_name(tmp_path, monkeypatch, command):
    module = f"extending_{tmp_path.name}"
    source = "from dataclasses import dataclass\nfrom fcl_bench.data.sources.digits import Digits\n\n"
    (tmp_path / f"{module}.py").write_text(f"{source}@dataclass\nclass Mine(Digits):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = (f"data._target_={module}.Mine", "method=fedncm", "tasks=2", "clients=2", f"out={tmp_path / 'out'}")
    code, _, err = command(*mine)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{module}.Mine has the name digits of fcl_bench.data.sources.digits.Digits (data.name=my_digits)" in err
    assert command(*mine, "data.name=mine")[0] == 0
