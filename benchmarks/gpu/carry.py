"""Files for a machine without network, in parts of limited size: packed here, put together again there.

    python benchmarks/gpu/carry.py wheels --to FOLDER                # what the machine's Python lacks, as wheels
    python benchmarks/gpu/carry.py pack FOLDER ... --to .carry --limit 50
    python3 benchmarks/gpu/carry.py unpack .carry/part-* --to .carry/there    # there: as often as there are parts

Each part holds pieces of files and says which. `unpack` keeps the pieces that have come, and makes each file as soon as
all of its pieces are there. Nothing but Python's own library is imported, since this runs there before all else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

#: Packages of which the image of the GPU machine had none when its list was read; all others it has.
LACKING = (
    *("antlr4-python3-runtime", "datasets", "dill", "hydra-core", "multiprocess", "omegaconf"),
    *("pytest-benchmark", "py-cpuinfo2"),  # of its versions none was told
)
MANIFEST, PIECES = "part.json", ".pieces"
_MIB = 10**6


def wheels(to: Path, python: str, platforms: list[str]) -> None:
    """Bring wheels of `LACKING` into a folder, of the versions installed here, for another version of Python.

    Raises:
        subprocess.CalledProcessError: pip could not; what it says is on the screen.
    """
    to.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    for name in LACKING:
        wanted = f"{name}=={version(name)}"
        if name == "antlr4-python3-runtime":  # has no wheel; one made of its source is for every Python
            subprocess.run([*pip, "wheel", "--no-deps", "-w", str(to), wanted], check=True)
            continue
        target = ["--python-version", python, "--implementation", "cp"]
        target += [word for platform in platforms for word in ("--platform", platform)]
        subprocess.run(
            [*pip, "download", "--no-deps", "--only-binary=:all:", *target, "-d", str(to), wanted], check=True
        )


def pack(folders: list[Path], to: Path, limit: int) -> list[Path]:
    """Write the files of `folders`, each below its folder's name, as parts of at most `limit` bytes.

    Returns:
        The parts' folders.
    """
    if limit < 1:
        raise ValueError(f"parts of {limit} bytes hold nothing")
    pieces: list[list[dict[str, object]]] = [[]]
    room = limit
    files = [(folder, file) for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    for folder, file in files:
        size, begin = file.stat().st_size, 0
        told = {
            "path": str(Path(folder.resolve().name) / file.relative_to(folder)),
            "size": size,
            "sha256": _hash(file),
        }
        while begin < size or not size:
            if not room:
                pieces.append([])
                room = limit
            length = min(room, size - begin)
            pieces[-1].append({**told, "begin": begin, "length": length, "from": str(file)})
            begin, room = begin + length, room - length
            if not size:
                break
    parts = []
    for number, own in enumerate(pieces):
        part = to / f"part-{number}"
        part.mkdir(parents=True)
        for index, piece in enumerate(own):
            with open(str(piece.pop("from")), "rb") as source:
                source.seek(int(str(piece["begin"])))
                (part / str(index)).write_bytes(source.read(int(str(piece["length"]))))
        (part / MANIFEST).write_text(json.dumps(own, indent=1) + "\n")
        parts.append(part)
    return parts


def unpack(parts: list[Path], to: Path) -> list[str]:
    """Take in parts, and make the files whose pieces are all there.

    Returns:
        The files of which pieces are missing, ascending.

    Raises:
        ValueError: a file's content is not what was packed; it is removed.
    """
    kept = to / PIECES
    kept.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for index, piece in enumerate(json.loads((part / MANIFEST).read_text())):
            name = hashlib.sha256(piece["path"].encode()).hexdigest()[:16] + f"-{piece['begin']}"
            (kept / name).write_bytes((part / str(index)).read_bytes())
            (kept / f"{name}.json").write_text(json.dumps(piece))
    files: dict[str, list[tuple[int, Path, dict]]] = {}
    for told in kept.glob("*.json"):
        piece = json.loads(told.read_text())
        files.setdefault(piece["path"], []).append((piece["begin"], told.with_suffix(""), piece))
    missing = []
    for path, own in files.items():
        own.sort(key=lambda piece: piece[0])
        size, digest = own[0][2]["size"], own[0][2]["sha256"]
        target, damaged = to / path, False
        # A part that comes a second time, as after a call that broke off, brings pieces of files that are made.
        if not (target.is_file() and _hash(target) == digest):
            if sum(piece["length"] for _, _, piece in own) < size:
                missing.append(path)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as file:
                for _, piece, _ in own:
                    file.write(piece.read_bytes())
            damaged = _hash(target) != digest
        # Of a damaged file too: pieces of two packings would be put together again and again.
        for _, piece, _ in own:
            piece.unlink()
            piece.with_suffix(".json").unlink()
        if damaged:
            target.unlink()
            raise ValueError(f"{path} is damaged: pack and carry it again")
    return sorted(missing)


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as source:
        while block := source.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def main(typed: list[str] | None = None) -> int:
    """Exit code 3: pieces are still missing after `unpack`; 2: wrong input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    bring = ways.add_parser("wheels")
    bring.add_argument("--python", default="3.12", help="the Python there (3.12)")
    bring.add_argument("--platform", nargs="+", default=["manylinux_2_28_x86_64", "manylinux_2_17_x86_64"])
    cut = ways.add_parser("pack")
    cut.add_argument("folders", nargs="+", type=Path)
    cut.add_argument("--limit", type=float, default=50, help="10^6 bytes of a part (50)")
    join = ways.add_parser("unpack")
    join.add_argument("parts", nargs="+", type=Path)
    for way in (bring, cut, join):
        way.add_argument("--to", type=Path, required=True)
    options = parser.parse_args(typed)
    try:
        if options.way == "wheels":
            wheels(options.to, options.python, options.platform)
        elif options.way == "pack":
            if absent := [str(folder) for folder in options.folders if not folder.is_dir()]:
                raise ValueError(f"{absent[0]} is no folder")
            if options.to.exists() and any(options.to.iterdir()):
                raise ValueError(f"--to {options.to} is not empty")
            for part in pack(options.folders, options.to, int(options.limit * _MIB)):
                print(f"{part}: {sum(file.stat().st_size for file in part.iterdir()) / _MIB:.1f} MB")
        elif missing := unpack(options.parts, options.to):
            print(f"pieces are still missing of {', '.join(missing)}")
            return 3
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"carry: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
