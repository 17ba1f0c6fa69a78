"""A progress bar for whatever takes longer than two seconds."""

import sys

from tqdm import tqdm


def progress(total: int, what: str, unit: str, done: int = 0) -> tqdm:
    """A bar with rate and time left on stderr, shown only once two seconds have passed.

    On a terminal it moves; in a log file it adds a line's worth every 30 seconds.

    Args:
        total: units of work in all.
        what: the text before the bar.
        unit: what is counted ("image"); of bytes ("B") in millions and the like.
        done: units that an earlier, interrupted pass already did (not counted in the rate).
    """
    live = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=what,
        unit=f" {unit}",
        unit_scale=unit == "B",
        initial=done,
        delay=2,
        mininterval=0.1 if live else 30,
        dynamic_ncols=live,
        leave=not live,
    )
