"""Stands for `flwr-clientapp`: hands the arguments over to `forks.py`, or is Flower's own program.

`python -IS handover.py SOCKET OWN ARGUMENT...` is started for every message, so it imports as little as it can, and
nothing of fcl-bench: it writes the frame of `frames.py` by hand.
"""

import json
import os
import socket
import sys

#: Seconds for an answer, which is there at once or never.
_PATIENCE = 5.0


def taken(path: str, arguments: list[str]) -> bool:
    """Return whether the process that listens at `path` has taken the arguments."""
    text = json.dumps({"header": {"arguments": arguments}, "lengths": []}).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_PATIENCE)
            line.connect(path)
            line.sendall(len(text).to_bytes(8, "little") + text)
            if not line.recv(1):
                raise ConnectionError("no answer")
    except OSError as error:
        print(f"fcl-bench: nobody forks here ({error}); this message's process starts anew", file=sys.stderr)
        return False
    return True


def main() -> None:
    """Hand over, or become Flower's own program."""
    path, own, *arguments = sys.argv[1:]
    if not taken(path, arguments):
        os.execv(own, [own, *arguments])


if __name__ == "__main__":
    main()
