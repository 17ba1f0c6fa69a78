"""All that can be typed, read from the YAML files: groups, their choices, the keys of each, and which was meant.

Neither Hydra nor any choice's class is imported, so that help and error messages are quick.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fcl_bench.composition import FOLDERS, NAMED_BY, choices_of, config_dir, file_of, groups, installed
from fcl_bench.config import YAML_LOADER
from fcl_bench.errors import UserError, choices

#: Matches `key: value  # comment` at any depth.
_LINE = re.compile(r'( *)"?(\w+)"?:(?: +(.*?))?(?: *# ?(.*))?')
#: Groups whose choices set keys of the whole run and have no keys of their own.
WHOLE_RUNS = ("experiment", "profile", "track")
#: Keys of a choice's YAML that are not knobs.
_NO_KNOBS = ("_target_", "defaults")


@dataclass(frozen=True)
class Knob:
    """One key: its default as written in the YAML, and its comment there."""

    default: str
    comment: str


@dataclass(frozen=True)
class Choice:
    """One choice of a group.

    Attributes:
        group, name: `group=name` chooses it.
        description: the first comment of its YAML.
        facts: further lines of that comment with the form `Word: text`, such as `Paper`, or `Example`, a command.
        knobs: key below the group (`training.lr`) -> knob, in the order of the YAML; a nested key follows its parent.
        brings: group -> its choice that comes with this one.
    """

    group: str
    name: str
    description: str
    facts: dict[str, str] = field(default_factory=dict)
    knobs: dict[str, Knob] = field(default_factory=dict)
    brings: dict[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The keys as they are typed; nested parts are replaced by their keys."""
        return [f"{self.group}.{name}" for name in self.knobs if name not in _parts(self.knobs)]


def search_also(folders: list[Path], arguments: list[str]) -> None:
    """From now on, look for choices in these folders and installed packages, too; `arguments` named the folders."""
    also = [*installed(), *folders]
    if also != FOLDERS[1:]:
        read_choice.cache_clear()
        keys_ending.cache_clear()
    FOLDERS[1:], NAMED_BY[:] = also, arguments


@functools.cache
def default_choices() -> dict[str, str]:
    """Group -> its default choice."""
    text = (config_dir() / "config.yaml").read_text()
    return dict(re.findall(r"^  - (\w+): (\w+)$", text, flags=re.MULTILINE))


@functools.cache
def read_choice(group: str, name: str) -> Choice:
    """Read a choice with its keys, including those that it takes over from another choice of the group.

    Raises:
        UserError: its YAML cannot be read.
    """
    file = file_of(group, name)
    text = file.read_text(errors="replace")
    try:
        content = yaml.load(text, Loader=YAML_LOADER)
    except yaml.MarkedYAMLError as error:
        raise unreadable(error, file) from error
    heading = [line[1:].strip() for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    facts = dict(line.split(": ", 1) for line in heading[1:] if re.match(r"[A-Z]\w+: ", line))
    knobs: dict[str, Knob] = {}
    brings = {}
    for entry in content.get("defaults") or [] if isinstance(content, dict) else []:
        if isinstance(entry, str) and file_of(group, entry).is_file():
            knobs |= read_choice(group, entry).knobs
        elif isinstance(entry, dict):
            for key, value in entry.items():
                if found := re.match(r"override /(\w+)", key):
                    brings[found[1]] = value
    own = {} if group in WHOLE_RUNS else _knobs(text)
    return Choice(group, name, heading[0] if heading else "", facts, _over(knobs, own), brings)


@functools.cache
def top_level() -> dict[str, Knob]:
    """The keys of `conf/config.yaml` that belong to no group, with their defaults and comments."""
    text = (config_dir() / "config.yaml").read_text()
    found = _knobs(text.split("override hydra/job_logging: none\n")[1].split("\nhydra:")[0])
    return {key: knob for key, knob in found.items() if key not in _parts(found)}


def unreadable(error: yaml.MarkedYAMLError, file: Path | None = None) -> UserError:
    """What is wrong with a YAML file, with the line and the column."""
    mark = error.problem_mark
    where = f"{file or mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(file)
    return UserError(f"{where}: {error.problem}", "a YAML file that can be read")


def owners(group: str, key: str) -> list[str]:
    """The choices of `group` that have this key (below the group), as a knob or as a part with knobs."""
    return [name for name in choices_of(group) if key in read_choice(group, name).knobs]


@functools.cache
def keys_ending(word: str) -> list[str]:
    """Every key of any choice, and every top-level key, whose last part is `word` in any case."""
    found = [key for key in top_level() if key.rpartition(".")[2].lower() == word.lower()]
    for group in groups():
        for name in choices_of(group):
            found += [key for key in read_choice(group, name).keys if key.rpartition(".")[2].lower() == word.lower()]
    return list(dict.fromkeys(found))


def _parts(knobs: Iterable[str]) -> set[str]:
    """The keys that have keys below them."""
    return {key.rpartition(".")[0] for key in knobs}


def _knobs(text: str) -> dict[str, Knob]:
    """The keys in a YAML file's text, in its order. An indented comment line continues the one before."""
    found: dict[str, Knob] = {}
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            if found and (further := re.fullmatch(r" +# ?(.*)", line)):
                last, knob = list(found.items())[-1]
                found[last] = Knob(knob.default, f"{knob.comment} {further[1]}")
            continue
        depth, name = len(match[1]), match[2]
        parents = [(above, key) for above, key in parents if above < depth]
        path = ".".join([*(key for _, key in parents), name])
        if path.partition(".")[0] not in _NO_KNOBS:
            found[path] = Knob(match[3] or "", match[4] or "")
        parents.append((depth, name))
    return found


def _over(taken: dict[str, Knob], own: dict[str, Knob]) -> dict[str, Knob]:
    """Return `taken` updated with `own`; a comment that `own` leaves out is kept."""
    result = dict(taken)
    for name, knob in own.items():
        is_mapping = re.fullmatch(r"\{.*\}", knob.default)  # whole on its line
        value: Any = yaml.load(knob.default, Loader=YAML_LOADER) if is_mapping else None
        if value and any(other.startswith(f"{name}.") for other in result):
            for key, entry in value.items():
                result[f"{name}.{key}"] = Knob(str(entry), result.get(f"{name}.{key}", knob).comment)
        else:
            before = result.get(name, knob)
            result[name] = Knob(knob.default, knob.comment or before.comment)
    return result


#: Words of papers and other tools -> our keys for them.
_KEYS_OF = yaml.load(Path(__file__).with_name("words.yaml").read_text(), Loader=YAML_LOADER)
_WORDS = {word: keys.split() for keys, words in _KEYS_OF.items() for word in words}
#: The part of a method with the usual keys of training, which are suggested before other keys of the same name.
_USUAL = "method.training."
#: The largest number of suggestions in one line.
_MOST = 3


def meant(word: str) -> list[str]:
    """The keys and groups that `word` may stand for, the likeliest first; empty if there is none."""
    last = word.rpartition(".")[2].lower().replace("-", "_")
    named = sorted(
        keys_ending(last), key=lambda key: (not key.startswith(_USUAL), not key.startswith("method."), key.count("."))
    )
    return list(dict.fromkeys([*_WORDS.get(last, ()), *([last] if last in groups() else []), *named]))


def unknown_key(
    key: str, value: str, known: Sequence[str], beside: Sequence[str], chosen: Mapping[str, str]
) -> UserError:
    """The error for a key that the composed configuration does not have.

    Args:
        known: every key of the configuration that is composed without it, dotted, and its groups.
    """
    group, _, below = key.partition(".")
    if below and group in groups() and group not in WHOLE_RUNS and (having := owners(group, below)):
        return _of_others(group, key, value, having, chosen[group], beside)
    likely = meant(key)
    if here := [candidate for candidate in likely if candidate in known][:_MOST]:
        return UserError(f"unknown key {key}", f"did you mean {' or '.join(here)}?")
    if likely:
        first = likely[0]
        group, _, below = first.partition(".")
        having = owners(group, below) if group in groups() else []
        others = f"{_names(having)} {'has' if len(having) == 1 else 'have'} it; {group}={chosen.get(group)} does not"
        return UserError(f"unknown key {key}", f"did you mean {first}? {others}")
    return UserError(f"unknown key {key}", choices(beside, key))


def unknown_option(option: str, value: str | None, options: Collection[str]) -> UserError:
    """The error for an unknown option, such as `--seed 3` in place of seed=3.

    Args:
        value: the argument after it, if that is neither an option nor an override.
    """
    name, has_value, own = option.lstrip("-").partition("=")
    written = f"={own if has_value else value}" if has_value or value is not None else "=VALUE"
    same = [key for key in (name, name.replace("-", "_")) if key in (*top_level(), *groups())]
    if likely := same or meant(name):
        return UserError(f"unknown option {option}", f"keys are written without dashes: {likely[0]}{written}")
    near = choices(options, f"--{name}")
    return UserError(f"unknown option {option}", f"keys are written {name}=VALUE; {near}")


def no_override(argument: str, value: str | None, commands: Collection[str], otherwise: str) -> UserError:
    """The error for an argument that is neither an option nor key=value: `seed 3`, `fedran`, `shwo`."""
    what = f"{argument or 'an empty argument'} is not key=value"
    key = argument if argument in (*top_level(), *groups()) else next(iter(meant(argument)), "")
    if key and value is not None:
        return UserError(what, f"did you mean {key}={value}?")
    for group in ("method", "data", "backbone", "experiment", *groups()):
        if argument in choices_of(group):
            return UserError(what, f"did you mean {group}={argument}?")
    near = choices(commands, argument)
    return UserError(what, f"{near.partition('?')[0]}?" if near.startswith("did you mean") else otherwise)


def _of_others(group: str, key: str, value: str, having: list[str], choice: str, beside: Sequence[str]) -> UserError:
    """The error for a key that other choices of its group have, and `choice` lacks."""
    own = ", ".join(name.removeprefix(f"{group}.") for name in beside) or "no keys"
    remedy = f"{group}={choice} has {own}"
    if key == "data.path" and value.endswith(".npz"):
        remedy = f"did you mean data=features data.path={value}? {remedy}"
    return UserError(f"unknown key {key}: it belongs to {_names(having)}", remedy)


def _names(names: list[str]) -> str:
    """Some of the names, and the number of the others."""
    if len(names) <= 6:
        return ", ".join(names)
    return f"{', '.join(names[:4])} and {len(names) - 4} more"
