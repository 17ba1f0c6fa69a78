"""Everything that a maintainer measures or tries: python -m benchmarks NAME [OPTIONS]; without NAME, the list of them.

Each takes --help. Results are files of one form (report.py), which `python -m benchmarks table FILE.json` shows again.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: What others import, and this file.
_NONE = {"__main__", "__init__", "report"}


def known() -> dict[str, str]:
    """Name -> what it is in one line, the first of its file; a package is run by its __main__.py."""
    files = {file.stem: file for file in HERE.glob("*.py") if file.stem not in _NONE}
    files |= {file.parent.name: file for file in HERE.glob("*/__main__.py")}
    told = {name: ast.get_docstring(ast.parse(files[name].read_text(encoding="utf-8"))) or "" for name in sorted(files)}
    return {name: text.partition("\n")[0] for name, text in told.items()}


def main(arguments: list[str]) -> int:
    """Run one of them, which may end the process with its own exit code; 2 for a name that is not known."""
    names = known()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{(__doc__ or '').strip()}\n")
        width = max(map(len, names))
        print(*(f"{name.ljust(width)}  {line}" for name, line in names.items()), sep="\n")
        return 0
    name, *options = arguments
    name = name.replace("-", "_")
    if name not in names:
        print(f"benchmarks: error: {arguments[0]} is not known (one of {', '.join(names)})", file=sys.stderr)
        return 2
    file = HERE / name / "__main__.py" if (HERE / name).is_dir() else HERE / f"{name}.py"
    sys.argv = [str(file), *options]
    if file.name == "__main__.py":
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(HERE))  # these files import each other by name, as when they are run by path
        runpy.run_path(str(file), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
