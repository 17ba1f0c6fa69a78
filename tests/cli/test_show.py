"""`fcl-bench show`: what it says of every choice is what the YAML files say, and its commands work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import takewhile

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from fcl_bench.cli.knobs import WHOLE_RUNS, keys_ending, meant, owners, read_choice, top_level
from fcl_bench.composition import choices_of, composed, config_dir, groups
from fcl_bench.config import GROUPS, load_settings
from fcl_bench.execution.plan import make_plan
from tests.conftest import write_features

CHOICES = [(group, name) for group in groups() for name in choices_of(group) if group not in WHOLE_RUNS]


def flat(node, prefix=""):
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif key not in ("_target_", "defaults"):
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("group", [group for group in groups() if group not in WHOLE_RUNS])
def test_every_key_of_a_choice_is_shown_with_its_default(group):
    for name in choices_of(group):
        content = yaml.safe_load((config_dir() / group / f"{name}.yaml").read_text())
        shown = read_choice(group, name).knobs
        for key, value in flat(content):
            parent = key.rpartition(".")[0]
            if key not in shown:  # a mapping in one line is shown as it is written
                assert yaml.safe_load(shown[parent].default)[key.rpartition(".")[2]] == value
            else:
                assert yaml.safe_load(shown[key].default or "null") == value or str(value) == shown[key].default


@pytest.mark.parametrize("group", groups())
def test_a_choice_is_described_in_one_line(group):
    """`--help` and `show` print the first line; each line below it is a fact, such as `Paper: ...`."""
    for name in choices_of(group):
        lines = (config_dir() / group / f"{name}.yaml").read_text().splitlines()
        heading = [line for line in takewhile(lambda line: line.startswith("#"), lines) if "@package" not in line]
        assert all(re.match(r"# [A-Z]\w+: ", line) for line in heading[1:]), name


@pytest.mark.parametrize("name", choices_of("method"))
def test_every_method_says_its_paper_and_its_cost(name):
    facts = read_choice("method", name).facts
    assert facts.keys() >= {"Paper", "Cost"}, f"conf/method/{name}.yaml needs lines # Paper: and # Cost: at its top"
    assert all(len(facts[word]) > 10 for word in ("Paper", "Cost"))


def test_a_choice_takes_over_keys_and_comments():
    knobs = read_choice("backbone", "vit_32").knobs
    assert knobs["name"].default == "vit_tiny_patch16_224"
    assert knobs["transform.size"].default == "32"
    assert "compiler" in knobs["compile"].comment  # of timm.yaml
    assert "so many" in read_choice("data", "cifar100").knobs["classes"].comment
    assert read_choice("data", "cifar100").brings == {"backbone": "resnet18"}
    assert "fedavg (its penalty" in read_choice("method", "fedewc").knobs["variant"].comment  # on a line of its own


def test_show_prints_keys_paper_cost_and_a_command(command):
    code, out, err = command("show", "method=stsa_e")
    assert (code, err) == (0, "")
    for text in (
        "method.dummy_clients=10 ",
        "K_D, groups",
        "paper: Guan et al.",
        "cost: (M + 1) c K_D numbers",
        "example:",
    ):
        assert text in out
    assert command("method=stsa_e", "--help")[1].startswith(out)


def test_show_lists_groups_choices_and_who_has_a_key(command):
    assert "  partition      8  dirichlet," in command("show")[1]
    assert "  seed=0 " in command("show")[1]
    assert "fedran" in command("show", "method")[1]
    out = command("show", "method.rank")[1]
    assert "method=fedran" in out
    assert "method=afl" not in out
    assert "concentration of the Dirichlet" in command("show", "beta")[1]
    assert "36 runs" in command("show", "experiment=stsa_table1")[1]


@pytest.mark.parametrize("columns", ["60", "200"])
def test_lines_fit_the_terminal(command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for asked in ("method=fedran", "backbone=vit_b16_stsa", "method"):
        lines = command("show", asked)[1].splitlines()
        assert max(len(line) for line in lines if " " in line.strip()) <= int(columns)


@pytest.mark.slow_cases("backbone", "data", "method", "partition")
@pytest.mark.parametrize("group", [*GROUPS, "logger"])
def test_the_commands_that_are_shown_compose(group, command):
    for name in choices_of(group):
        out = command("show", f"{group}={name}")[1]
        [line] = [line.strip() for line in out.partition("example:")[2].splitlines() if line.strip()]
        words = shlex.split(line)
        settings = load_settings(composed([word for word in words if "=" in word]))
        if group in ("noise", "secure"):  # which do not suit every method
            make_plan(settings)


@pytest.mark.parametrize("choice", ["backbone=identity", "data=features", "data=sites", "split=given"])
def test_the_commands_for_files_of_ones_own_fit_these(choice, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_features(tmp_path / "FEATURES.npz")
    numbers = np.arange(8)
    np.savez("TEST.npz", x=np.eye(8), column=numbers % 4, task=numbers % 4 // 2)
    words = shlex.split(command("show", choice)[1].partition("example:")[2])[1:]
    settings = load_settings(composed(words))
    group, _, name = choice.partition("=")
    assert getattr(settings, group).name == name
    if settings.transport.name == "flower":  # whose plan asks the nodes
        assert len(settings.split.cut(settings.data.load(), settings.scalars.tasks, 0).tasks) == 2
    else:
        make_plan(settings)


def test_what_is_meant_by_a_word_is_a_key():
    top: dict = OmegaConf.to_container(composed(["method=feddyn", "data=cifar100"]))  # type: ignore[assignment]
    known = {*(key for key, _ in flat(top)), *groups(), "method.ridge", "method.gamma"}
    for word in ("lr", "epochs", "alpha", "local_epochs", "num_clients", "dataset", "model", "lam", "wd", "output_dir"):
        assert set(meant(word)[:1]) <= known
        assert meant(word), word
    assert meant("xyzzy") == []
    assert owners("method", "rank") == [
        name for name in choices_of("method") if "rank" in read_choice("method", name).knobs
    ]
    assert "method.training.lr" in keys_ending("LR")
    assert {"seed", "wire.dtype"} <= top_level().keys()


def completed(typed: str) -> list[str]:
    program = "import sys; from fcl_bench.cli.app import main; sys.argv = ['fcl-bench', '-sc', 'query=bash']; main()"
    variables = {**os.environ, "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.slow
def test_the_shell_completes_choices_and_keys(command):
    code, out, _ = command("-sc", "install=bash")
    assert code == 0
    assert out.rstrip().endswith("-F hydra_bash_completion fcl-bench")
    assert completed("fcl-bench method=stsa") == ["method=stsa", "method=stsa_e"]
    assert "method.dummy_clients=" in completed("fcl-bench method=stsa_e method.")
