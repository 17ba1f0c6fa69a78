"""The sides to measure: ours, the plain loop, and the public repositories."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Side:
    """One column of the comparison.

    Attributes:
        name: of its adapter in this folder, too.
        title: for readers.
        repository: owner and name; "": none is needed.
    """

    name: str
    title: str
    repository: str = ""

    def checkout(self, peers: Path | None) -> Path:
        """The folder of its code, as `git clone` names it."""
        return (peers or Path()) / self.repository.partition("/")[2]

    def missing(self, peers: Path | None) -> str | None:
        """One line on why it can't be measured and what to do; None if it can."""
        if not self.repository:
            return None
        clone = f"git clone https://github.com/{self.repository} into the folder of --peers"
        if peers is None:
            return f"{self.title}: not measured, no --peers DIR: {clone}"
        folder = self.checkout(peers)
        return None if folder.is_dir() else f"{self.title}: not measured, no {folder}: {clone}"

    def commit(self, peers: Path | None) -> str:
        """Return the revision of the checkout; "unknown" if it is no repository of its own."""
        if peers is None or not (self.checkout(peers) / ".git").exists():
            return "unknown"
        command = ["git", "-C", str(self.checkout(peers)), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else "unknown"


OURS = Side("ours", "fcl-bench")
SIDES = {
    side.name: side
    for side in (
        OURS,
        Side("plain", "a plain loop"),
        Side("pfllib", "PFLlib", "TsingZ0/PFLlib"),
        Side("fl_bench", "FL-bench", "KarhouTam/FL-bench"),
        Side("fed_mammoth", "fed-mammoth", "aimagelab/fed-mammoth"),
        Side("afl", "AFL's code", "ZHUANGHP/Analytic-federated-learning"),
        Side("stsa", "STSA's code", "Yuqin-G/STSA"),
    )
}
