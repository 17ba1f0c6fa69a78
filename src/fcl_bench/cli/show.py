"""`fcl-bench show` and `--help`: the groups and choices, and for one choice its keys, paper, cost and a command."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from fcl_bench.cli.command import DONE
from fcl_bench.cli.knobs import (
    WHOLE_RUNS,
    Choice,
    Knob,
    default_choices,
    meant,
    owners,
    read_choice,
    top_level,
)
from fcl_bench.composition import NAMED_BY, choices_of, current, groups
from fcl_bench.errors import UserError, choices, require_choice


def work(arguments: list[str]) -> int:
    """Print what is asked for. Raises a `UserError` if the group, choice or key does not exist."""
    if {"-h", "--help"} & set(arguments):
        print(usage(), end="")
        return DONE
    print("\n\n".join(map(_shown, current(arguments))) if arguments else _groups())
    return DONE


def about(group: str, name: str) -> str:
    """Describe one choice in full. Raises a `UserError` if it does not exist."""
    require_choice(group, name, choices_of(group))
    choice = read_choice(group, name)
    parts = [f"{group}={name}", _wrapped(choice.description)]
    if choice.knobs:
        knobs = {key: choice.knobs[key.removeprefix(f"{group}.")] for key in choice.keys}
        parts += ["", "keys and their defaults:", _rows(knobs)]
    facts = {word: text for word, text in choice.facts.items() if word != "Example"}
    parts += [""] if facts or choice.brings else []
    parts += [_wrapped(f"{word.lower()}: {text}") for word, text in facts.items()]
    parts += [f"brings: {other}={value}" for other, value in choice.brings.items()]
    return "\n".join([*parts, "", "example:", *(f"  {command}" for command in _commands(choice))])


def _shown(word: str) -> str:
    group, equals, name = word.partition("=")
    if equals and group in groups():
        return about(group, name)
    if word in groups():
        return _choices(word)
    if not equals and (found := _key(word)):
        return found
    if meaning := [*(f"{group}={word}" for group in groups() if word in choices_of(group)), *meant(word)]:
        raise UserError(f"show {word}: there is no such group or key", f"did you mean show {meaning[0]}?")
    known = [*groups(), *top_level()]
    raise UserError(f"show {word}: there is no such group or key", choices(known, group, most=len(known)))


def _groups() -> str:
    parts = ["groups, with how many choices each has (`fcl-bench show GROUP` lists them):", ""]
    for group in groups():
        names = choices_of(group)
        listed = textwrap.shorten(", ".join(names), _width() - 20, placeholder=" ...")
        parts.append(f"  {group:<12} {len(names):>3}  {listed}")
    return "\n".join([*parts, "", "top-level keys:", _rows(top_level())])


def _choices(group: str) -> str:
    names = choices_of(group)
    lines = _two_columns((name, read_choice(group, name).description) for name in names)
    return "\n".join([f"{group}= (`fcl-bench show {group}={names[0]}` shows the keys of one)", "", *lines])


def _key(key: str) -> str:
    """Describe a key; "" if nothing has it."""
    if key in top_level():
        return _rows({key: top_level()[key]})
    group, _, below = key.partition(".")
    if group not in groups() or group in WHOLE_RUNS or not below:
        return ""
    knobs = {f"{group}={name}": read_choice(group, name).knobs[below] for name in owners(group, below)}
    texts = [(name, f"{knob.default}  {knob.comment}".rstrip()) for name, knob in knobs.items()]
    return "\n".join([key, *_two_columns(texts)]) if knobs else ""


def _commands(choice: Choice) -> list[str]:
    chosen = f"{choice.group}={choice.name}"
    if choice.group == "experiment":
        from fcl_bench.papers.experiments import runs_of

        size = {profile: len(runs_of(choice.name, profile)) for profile in ("full", "quick")}
        rows = [
            (f"fcl-bench -m {chosen}", f"{size['full']} runs"),
            (f"fcl-bench -m {chosen} profile=quick", f"{size['quick']} runs in miniature"),
            (f"fcl-bench {chosen} --cfg job", "prints the settings of its first run"),
        ]
        return _two_columns(rows, indent="")
    images = " data=cifar100" if choice.group == "backbone" and "checkpoint" in choice.knobs else ""
    beside = " data=digits profile=quick" if "training" in choice.knobs else ""
    own = "".join(f" {shlex.quote(argument)}" for argument in NAMED_BY)
    return [choice.facts.get("Example", f"fcl-bench{own}{images} {chosen}{beside}")]


def _rows(knobs: Mapping[str, Knob]) -> str:
    return "\n".join(_two_columns((f"{key}={knob.default}", knob.comment) for key, knob in knobs.items()))


def _two_columns(rows: Iterable[tuple[str, str]], indent: str = "  ", most: int | None = None) -> list[str]:
    """Lines of names and texts, each wrapped to `most` lines at most; a name that is too long has its own line."""
    pairs = list(rows)
    left = min(max((len(name) for name, _ in pairs), default=0), 44, _width() - 30)
    wide = max(24, _width() - left - len(indent) - 2)
    lines = []
    for name, text in pairs:
        folded = textwrap.wrap(text, wide, break_long_words=False, max_lines=most, placeholder=" ...") or [""]
        if len(name) > left:
            lines.append(f"{indent}{name}")
            name = ""
        for number, part in enumerate(folded):
            lines.append(f"{indent}{name if number == 0 else '':<{left}}  {part}".rstrip())
    return [line for line in lines if line.strip()]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _width(), initial_indent="  ", subsequent_indent="    ", break_long_words=False)


def _width() -> int:
    return max(60, shutil.get_terminal_size().columns)


def usage() -> str:
    """The general help: what can be typed, every choice of every group, and the top-level keys."""
    parts = [
        Path(__file__).with_name("help.txt").read_text(),
        "groups and their choices, of which `fcl-bench show GROUP` says more:",
    ]
    for group in groups():
        default = default_choices().get(group)
        names = {name: f"{'*' if name == default else ' '} {name}" for name in choices_of(group)}
        about = ((shown, read_choice(group, name).description) for name, shown in names.items())
        parts += [f"  {group}", *_two_columns(about, indent="   ", most=1)]
    parts += ["  (* default; a data set may bring the backbone that suits it)\n", "top-level keys and their defaults:"]
    return "\n".join([*parts, _rows(top_level())]) + "\n"
