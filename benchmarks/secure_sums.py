"""The cost of secure sums: CPU seconds of one client and of the server in one round, by clients and numbers.

    python -m benchmarks secure_sums                # STSA's upload of 10 classes for some M and K
    python -m benchmarks secure_sums --quick

All clients agree on keys and share their secrets. One of them masks a whole upload, which represents all uploads in the
sum; the server removes as many masks from it as it would from theirs.
"""

from __future__ import annotations

import argparse
import time

import torch

from fcl_bench.options.secure.aggregation import Aggregation
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.options.secure.party import KEYS, SHARES, TAKE_IN, UNMASKING, Parties, simulated
from fcl_bench.protocol.fields import SUM, Uploads, real
from fcl_bench.protocol.message import Message

#: What clients send: sums.
UPLOADS = Uploads({"statistics": {"*": real(combine=SUM)}})
#: Clients, random features, neighbours (None: all), share of the clients that drop out.
CASES = [(10, 512, None, 0.0), (10, 2048, None, 0.0), (10, 2048, None, 0.3), (100, 512, None, 0.0)]
CASES += [(100, 2048, None, 0.0), (100, 2048, None, 0.1), (100, 2048, 20, 0.1)]
QUICK = [(5, 64, None, 0.0), (8, 64, 4, 0.25)]
CLASSES = 10


def measured(clients: int, M: int, neighbours: int | None, missing: float) -> dict[str, float]:
    """CPU seconds: of one client for its keys and shares, and for its upload; of the server for the sum."""
    parties = Parties(SecureSums(neighbours=neighbours, threshold=0.5), simulated(0, "run"), UPLOADS)
    everyone = range(clients)

    def asked(client: int, stage: str, tensors) -> Message:
        answer = parties.answer(client, Message(tensors, stage))
        assert answer is not None
        return answer

    begin = time.process_time()
    keys = {client: asked(client, KEYS, {}) for client in everyone}
    server = Aggregation(SecureSums(neighbours=neighbours, threshold=0.5), 0, Message({}), keys)
    for client in everyone:
        server.take_shares(client, asked(client, SHARES, server.shares_request(client)))
    for client in everyone:
        asked(client, TAKE_IN, server.take_in_request(client))
    shared = time.process_time()
    small = Message({"n": torch.zeros(1, dtype=torch.int64)}, summed=["n"])
    for client in everyone[1:]:
        parties.send(small, client)
    draw = torch.Generator().manual_seed(0)
    tensors = {"G": torch.randn(M, M, generator=draw).double(), "C": torch.randn(M, CLASSES, generator=draw).double()}
    before = time.process_time()
    upload = parties.send(Message(tensors, summed=tensors), 0)
    masked = time.process_time()
    server.add(0, upload)
    added = time.process_time()
    server.survivors = list(everyone[: clients - round(missing * clients)])
    answers = {client: asked(client, UNMASKING, server.unmasking_request(client)) for client in server.survivors}
    answered = time.process_time()
    server.unmasked(answers)
    return {
        "client, keys and shares": (shared - begin) / clients,
        "client, upload": masked - before,
        "server, unmasking": time.process_time() - answered,
        "server, per upload": added - masked,
        "upload in MB": upload.nbytes / 1e6,
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    cases = QUICK if parser.parse_args().quick else CASES
    header = ["clients", "M", "neighbours", "missing", *measured(2, 8, None, 0.0)]
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for case in cases:
        found = [f"{value:.3f}" for value in measured(*case).values()]
        print("| " + " | ".join([str(value) for value in case] + found) + " |", flush=True)


if __name__ == "__main__":
    main()
