"""`fcl-bench new`: writes a small package with a choice of one's own, which is then one like those of fcl-bench."""

from __future__ import annotations

import keyword
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from fcl_bench.cli.command import DONE, Parser
from fcl_bench.composition import RENAMED, choices_of
from fcl_bench.errors import UserError, choices

_TEMPLATES = Path(__file__).with_name("templates")
KINDS = ("method", "data", "split", "partition", "backbone")
#: Words that Hydra or YAML read as values, and the names of folders that the package or Hydra's plugins have.
_RESERVED = ("null", "true", "false", "inf", "nan", "yes", "no", "on", "off", "conf", "tests", "hydra_plugins")


def work(arguments: list[str]) -> int:
    """Write the package. Raises a `UserError` if the name or the folder cannot be taken; nothing is written then."""
    parser = Parser(prog="fcl-bench new", description="Write an installable package with a choice of your own.")
    parser.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("name", metavar="NAME", help="of the choice and of the package: small letters, digits and _")
    parser.add_argument("--in", dest="parent", default=".", metavar="FOLDER", help="where its folder is made")
    options = parser.parse_args(arguments)
    kind, name = options.kind, options.name
    if kind not in KINDS:
        raise UserError(f"new {kind}: there is no such kind", choices(KINDS, kind))
    folder = Path(options.parent) / name
    _require_free(kind, name, folder)
    files = package(kind, name)
    try:
        # Made under another name, so that a failure leaves nothing half-written.
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
            made = Path(temporary) / name
            for path, content in files.items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(content)
            made.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}", "--in FOLDER with room to write") from error
    wide = max(map(len, files))
    about = {f"{name}/{kind}.py": "the code: begin here", "pyproject.toml": "tells fcl-bench of the package"}
    about |= {f"{name}/conf/{kind}/{name}.yaml": "its keys and their defaults", f"tests/test_{name}.py": "its tests"}
    print(f"{folder}:")
    print("\n".join(f"  {path:<{wide}}  {about.get(path, '')}".rstrip() for path in files))
    run = f"fcl-bench {kind}={name}" + (" method=fedncm" if kind != "method" else "")
    print(f"\nnext:\n  python -m pip install -e {folder}\n  {run}\n  python -m pytest {folder / 'tests'}")
    return DONE


def package(kind: str, name: str) -> dict[str, str]:
    """The files of the package, by their paths in its folder."""
    words = {"my_name": name, "MyName": class_name(name), "KIND": kind}
    templates = {
        "pyproject.toml": "pyproject.toml",
        f"{name}/__init__.py": "",
        f"{name}/{kind}.py": f"{kind}/module.py",
        f"{name}/conf/{kind}/{name}.yaml": f"{kind}/choice.yaml",
        f"tests/test_{name}.py": f"{kind}/test.py",
    }
    texts = {path: (_TEMPLATES / f"{file}.tmpl").read_text() if file else "" for path, file in templates.items()}
    return {path: re.sub("|".join(words), lambda word: words[word[0]], text) for path, text in texts.items()}


def class_name(name: str) -> str:
    """`my_name` as the name of a class: MyName."""
    return "".join(part.capitalize() for part in name.split("_"))


def _require_free(kind: str, name: str, folder: Path) -> None:
    """Raise a `UserError` unless the name and the folder can be taken."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > 40:
        words = re.findall("[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())
        near = re.sub(r"^[0-9_]+", "", "_".join(words))[:40].strip("_") or f"my_{kind}"
        raise UserError(f"{name or 'an empty name'} is no name for a package", f"small letters, such as {near}")
    if name in choices_of(kind) or (kind == "method" and name in RENAMED):
        raise UserError(f"{kind}={name} is there already", f"a name of its own, such as my_{name}")
    if keyword.iskeyword(name) or name in (*_RESERVED, *KINDS) or name in sys.stdlib_module_names:
        raise UserError(f"{name} is a word of Python's or of fcl-bench's", f"a name of its own, such as my_{name}")
    code = (_TEMPLATES / kind / "module.py.tmpl").read_text()
    if re.search(rf"\b{class_name(name)}\b", code):
        raise UserError(f"{class_name(name)} is a class that the {kind} needs", f"a name of its own, such as my_{name}")
    if not folder.parent.is_dir():
        raise UserError(f"--in {folder.parent} is no folder", "a folder that is there")
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already", "another name, or --in FOLDER")
    found = find_spec(name)
    if found is not None and found.origin is not None:
        raise UserError(f"{name} is an installed package", f"a name of its own, such as my_{name}")
