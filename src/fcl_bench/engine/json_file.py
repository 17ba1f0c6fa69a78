"""JSON files with a checksum of themselves, for readers that need no tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcl_bench.files import json_hash, regular, replacing


def _checksum(content: Mapping[str, Any]) -> str:
    return json_hash({key: value for key, value in content.items() if key != "checksum"})


def write_json(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write `content` with a checksum of itself; returns what was written."""
    # It goes through JSON once, so that the checksum covers what a reader will see (lists for tuples, text for keys).
    written: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    written["checksum"] = _checksum(written)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(written, indent=2) + "\n")
    return written


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote. Raises ValueError if it does not match its checksum, OSError if it is not a file."""
    content = json.loads(regular(path).read_text())
    if not isinstance(content, dict) or content.get("checksum") != _checksum(content):
        raise ValueError("it does not match its own checksum")
    return content
