"""The methods that docs/adding.md writes out are ones that run as they stand there."""

from __future__ import annotations

import json
import re
import textwrap

import pytest

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "adding.md").read_text()
#: Runs of indented lines, blank ones among them.
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n(?:[ \t]*\n)*)+", PAGE, flags=re.M)]
FINETUNE = (REPOSITORY / "conf" / "method" / "finetune.yaml").read_text()
TRAINING = ("backbone=tiny", "backbone.width=4", "method.training.rounds=2", "method.training.epochs=1")


def block_with(text: str) -> str:
    [found] = [block for block in BLOCKS if text in block]
    return found


@pytest.mark.parametrize(
    ("name", "code", "knobs", "overrides"),
    [
        ("my_method", "class MyClient(", "M: 2048\nridge: 1.0\n", ("method.M=64",)),
        (
            "memory",
            "class MemoryClient(",
            FINETUNE.partition("_target_")[2].partition("\n")[2] + "kept: 20\n",
            TRAINING,
        ),
    ],
)
def test_a_method_of_the_page_runs_as_it_stands(name, code, knobs, overrides, tmp_path, monkeypatch, command):
    source = block_with(code)
    (tmp_path / f"added_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = re.findall(r"^class (\w+)\(", source, flags=re.M)[-1]
    folder = tmp_path / "conf" / "method"
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(f"# From the page\n_target_: added_{name}.{kind}\n{knobs}")
    found = {
        "my_method": ("--config-dir", str(tmp_path / "conf")),
        "memory": (f"hydra.searchpath=[file://{tmp_path / 'conf'}]",),
    }[name]
    code, _, err = command(*found, f"method={name}", "tasks=3", "clients=3", f"out={tmp_path / 'out'}", *overrides)
    assert (code, err) == (0, "")
    [file] = (tmp_path / "out" / "runs").glob(f"{name}-*/run.json")
    record = json.loads(file.read_text())
    if name == "my_method":
        assert record["metrics"]["A_T"] > 80
        assert record["client_storage_bytes"] == {}
    else:
        # Twenty images of 3 x 8 x 8 bytes, and their labels, of each of three tasks.
        assert record["client_storage_bytes"] == {"images": 3 * 20 * 192, "labels": 3 * 20 * 8}
