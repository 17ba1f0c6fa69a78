"""Ask pip-audit for known faults of the installed packages: `python -m benchmarks.audit`, a part of `make lint`.

The exit code is 1 where a fault has a version that mends it. Where no data can be had, a line says so, and it is 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

#: Whether there are data at all is asked of one package that every environment has.
_PROBE = "pip"
_SECONDS = 300


class NoData(Exception):
    """Nothing can be asked here; the message has the reason."""


def found(*arguments: str) -> list[dict[str, Any]]:
    """What pip-audit says of packages. Raises `NoData` where it cannot run."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        return list(json.loads(done.stdout)["dependencies"])
    except subprocess.TimeoutExpired:
        raise NoData(f"no answer within {_SECONDS} seconds") from None
    except (ValueError, KeyError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise NoData(lines[-1] if lines else f"exit code {done.returncode}") from None


def told(packages: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """A line for each fault and one for all, and whether a fault could be mended.

    Args:
        packages: as `found` returns them; one without data has `skip_reason`.
    """
    known = [package for package in packages if "skip_reason" not in package]
    faults = [(package, fault) for package in known for fault in package["vulns"]]
    lines = [
        f"pip-audit: {package['name']} {package['version']} has {fault['id']},"
        f" mended in {', '.join(fault['fix_versions']) or 'no version yet'}"
        for package, fault in faults
    ]
    others = [package["name"] for package in packages if "skip_reason" in package]
    without = f"; no data of {len(others)}: {', '.join(others[:5])}{' ...' * (len(others) > 5)}" if others else ""
    lines.append(f"pip-audit: {len(faults)} known faults in {len(known)} packages{without}")
    return lines, any(fault["fix_versions"] for _, fault in faults)


def main() -> int:
    try:
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder) / "requirements.txt"
            probe.write_text(f"{_PROBE}=={metadata.version(_PROBE)}\n")
            if all("skip_reason" in package for package in found("--no-deps", "--disable-pip", "-r", str(probe))):
                raise NoData("the package index has no data on faults")
        lines, mends = told(found("--local"))
    except NoData as reason:
        print(f"pip-audit: NOTHING WAS CHECKED, since {reason}", flush=True)
        return 0
    print("\n".join(lines), flush=True)
    return int(mends)


if __name__ == "__main__":
    sys.exit(main())
