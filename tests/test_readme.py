"""The commands in the README and the docs are ones that work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module

import pytest

from fcl_bench.cli import overrides
from fcl_bench.composition import choices_of
from fcl_bench.config import GROUPS
from fcl_bench.errors import choices
from fcl_bench.flower.node import parsed
from tests.conftest import REPOSITORY
from tests.small_methods import ALIASES, NAMES

METHODS = REPOSITORY / "docs" / "methods"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
#: Pages without their fenced blocks: those show what is printed, or commands with other people's programs.
TEXTS = [re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S) for page in PAGES]
LINES = [line.split(" #")[0].strip() for text in TEXTS for line in text.splitlines() if line[:4] == " " * 4]
COMMANDS = [line for line in LINES if re.match(r"fcl-bench(?!-node)", line)]
#: Groups of whose choices each is composed by default.
CHOSEN = {"experiment", "profile", "track", "logger", "hydra/launcher", *GROUPS}


def commands() -> Iterator[tuple[str, list[pytest.MarkDecorator]]]:
    """Each command once; those with no key and no choice that an earlier one lacks are slow."""
    seen: set[str] = set()
    for line in sorted({line.replace(" ...", "") for line in COMMANDS}):
        typed = [word.partition("=") for word in shlex.split(line)[1:]]
        words = {key if key.lstrip("+~") not in CHOSEN else f"{key}={value}" for key, _, value in typed}
        yield line, [] if words - seen else [pytest.mark.slow]
        seen |= words


#: What is typed at a node.
NODES = [typed.strip() for line in LINES for typed in re.findall(r"^fcl-bench-node ([^&;]+)", line)]


def test_the_readme_holds_its_commands():
    assert len([command for command in COMMANDS if "data=" in command]) >= 4


@pytest.mark.parametrize("line", [pytest.param(line, marks=marks) for line, marks in commands()])
def test_every_command_composes_and_passes_the_checks(line, command, tmp_path, monkeypatch):
    """Paths in capitals stand for the reader's own files; everything else must be accepted as written."""
    from fcl_bench.composition import composed
    from fcl_bench.config import load_settings

    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(line)[1:]
    for argument in arguments:
        if found := re.fullmatch(r"backbone\.checkpoint=([A-Z0-9_]+\.safetensors)", argument):
            (tmp_path / found[1]).touch()
    if arguments[0] in ("predict", "runs", "leaderboard", "rank"):
        assert import_module(overrides.COMMANDS[arguments[0]]).parsed(arguments[1:])
        return
    if "--help" in arguments or arguments[0] in ("show", "new", "plan"):
        assert command(*arguments)[0] == 0
        return
    arguments = [argument for argument in arguments if argument not in ("--cfg", "job")]
    # Of what a sweep lists the first; a value in brackets is one list.
    jobs = [re.split(r",(?![^\[{]*[]}])", argument)[0] for argument in arguments if argument != "-m"]
    load_settings(composed(jobs))


@pytest.mark.parametrize("line", sorted(set(NODES)))
def test_every_line_of_a_node_is_one_that_it_takes(line):
    first, *rest = shlex.split(line)
    # `init` and `audit` have no clients; tests/flower/test_site_commands.py types them.
    assert first in ("init", "audit") or parsed(rest if first in ("check", "withdraw") else [first, *rest]).clients


def test_the_make_targets_exist_and_ci_calls_the_readmes_test_command():
    readme, makefile = (REPOSITORY / "README.md").read_text(), (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"^ {4}make ([\w-]+)$", readme, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M)
    assert "make test\n" in (REPOSITORY / ".ci" / "run").read_text()


def test_every_link_and_picture_is_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), (page, target)


def test_every_method_has_its_page_and_row():
    table = (METHODS / "index.md").read_text()
    for name in NAMES:
        assert f"| [`{name}`]({name}.md) |" in table
        assert (METHODS / f"{name}.md").exists()


def test_the_readmes_number_of_methods_is_that_of_errors():
    told = re.search(r"runs \[(\d+) methods\]\(\S+\) under (\d+) names", (REPOSITORY / "README.md").read_text())
    assert told is not None
    assert (int(told[1]), int(told[2])) == (len(NAMES), len(NAMES) + len(ALIASES))
    assert choices(choices_of("method"), "zzz") == f"one of {told[2]} choices"


@pytest.mark.parametrize(("alias", "method"), ALIASES.items())
def test_every_other_name_of_a_method_is_in_the_table_and_on_its_page(alias, method):
    assert f"`{alias}`" in (METHODS / "index.md").read_text()
    assert f"`method={alias}`" in (METHODS / f"{method}.md").read_text()
