"""Notes and warnings that many clients or tasks would repeat, told once."""

from __future__ import annotations

import logging


class Notices:
    """Tells each kind of notice once, through the log (terminal and run.log)."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()

    def tell(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        """Log `text`, unless something of this `kind` has been told already."""
        if kind not in self._told:
            self._told.add(kind)
            self._log.log(level, text)
