"""FedRAN: federated random-feature analytic continual learning (papers: "Accurate and Resource-Efficient FCL").

One round per task. Each client sends a truncated SVD of its random features and its exact class sums; the server merges
the summaries over clients and then over tasks, and solves ridge regression in the subspace it kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.data.stream import Task
from fcl_bench.errors import UserError, require_choice, require_count, require_memory, require_positive
from fcl_bench.federation.accounting import fedran_mib, fedran_under_stsa_mib
from fcl_bench.federation.message import Message, column_bytes
from fcl_bench.linalg.merging import MERGERS, Merger
from fcl_bench.linalg.random_features import RandomFeatures
from fcl_bench.linalg.ridge import subspace_ridge
from fcl_bench.linalg.spectral import Spectrum, merge, summarise
from fcl_bench.methods.base import Client, Method, Problem, Server, Shard
from fcl_bench.randomness import derived_seed


@dataclass
class FedRAN(Method):
    """Knobs of FedRAN.

    Args:
        M: number of random features; None: the backbone's features themselves, H = Z.
        rank: r, directions kept by clients and server; None: as many as `budget_bytes` allows, else M.
        ridge: lambda of Eq. 29.
        merge: how the server merges the clients of a task: "sequential" (the paper: pairwise in turn, truncating each
            time), "joint" (all in one SVD, which holds the task's summaries together) or "tree" (pairwise, balanced).
        budget_bytes: most that a client may upload for a task; the rank of its summary is then at most what Eq. 12
            allows. The server keeps `rank` directions all the same, or the most that any task allowed.
    """

    name: ClassVar[str] = "fedran"

    M: int | None = 2048
    rank: int | None = 512
    ridge: float = 1e-3
    merge: str = "sequential"
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        require_count("method.M", self.M)
        require_count("method.rank", self.rank)
        require_positive("method.ridge", self.ridge)
        require_choice("method.merge", self.merge, MERGERS)
        self._require_rank_within(self.M)

    def _require_rank_within(self, M: int | None) -> None:
        if M is not None and self.rank is not None and self.rank > M:
            raise UserError(
                f"method.rank={self.rank} is more than the {M} random features",
                f"1 to {M}, or a larger method.M",
            )

    def dimension(self, problem: Problem) -> int:
        """M, the width of H."""
        return problem.inputs if self.M is None else self.M

    def check(self, problem: Problem, classes_per_task: list[int]) -> None:
        M = self.dimension(problem)
        if self.M is not None:
            require_memory(f"method.M={M}", 8 * problem.inputs * M, "the projection")
        if self.M is None and self.rank is not None and self.rank > M:
            raise UserError(f"method.rank={self.rank} is more than the {M} features (method.M=null)", f"1 to {M}")
        if self.budget_bytes is not None:
            most = max(classes_per_task)
            if self.feasible_rank(problem, most) < 1:
                least = upload_bytes(M, 1, most, problem.wire_dtype)
                raise UserError(
                    f"method.budget_bytes={self.budget_bytes} does not hold one direction and {most} class sums",
                    f"at least {least} with M={M} and wire.dtype={str(problem.wire_dtype).removeprefix('torch.')}",
                )

    def feasible_rank(self, problem: Problem, classes: int) -> int:
        """r for an upload with `classes` class sums: `rank`, M, and what the byte budget allows (Eq. 12)."""
        M = self.dimension(problem)
        rank = M if self.rank is None else self.rank
        if self.budget_bytes is not None:
            fixed = upload_bytes(M, 0, classes, problem.wire_dtype)
            per_direction = upload_bytes(M, 1, classes, problem.wire_dtype) - fixed
            rank = min(rank, (self.budget_bytes - fixed) // per_direction)
        return min(rank, M)

    def client(self, problem: Problem) -> FedRANClient:
        return FedRANClient(self, problem)

    def server(self, problem: Problem) -> FedRANServer:
        return FedRANServer(self, problem)

    def accounting(self, problem: Problem, classes_per_task: list[int]) -> dict[str, float]:
        M = self.dimension(problem)
        ranks = [self.feasible_rank(problem, classes) for classes in classes_per_task]
        return {
            "fedran_mib": fedran_mib(M, max(ranks), sum(classes_per_task)),
            "stsa_mib": fedran_under_stsa_mib(M, ranks, classes_per_task),
        }


def upload_bytes(M: int, rank: int, classes: int, wire_dtype: torch.dtype) -> int:
    """Size of a full upload: V (M, r), sigma (r,), B (M, c) (Eq. 11)."""
    return (rank + classes) * column_bytes(M, wire_dtype) + rank * column_bytes(None, wire_dtype)


class FedRANClient(Client):
    """Random features, thin SVD, class sums (Alg. 1, lines 7-13). Keeps nothing but the projection."""

    def __init__(self, method: FedRAN, problem: Problem) -> None:
        self._method = method
        self._problem = problem
        self._features: tuple[int, RandomFeatures] | None = None

    def update(self, shard: Shard, broadcast: Message) -> Message:
        """V (M, r_kt), sigma (r_kt,) and B (M, c_t), the exact class sums over the task's classes."""
        H = self._random_features(int(broadcast["seed"])).map(shard.inputs)
        columns = broadcast["columns"].to(H.device)
        rank = self._method.feasible_rank(self._problem, len(columns))
        (V, sigma), _ = summarise(H, rank)
        one_hot = (shard.labels.unsqueeze(1) == columns).to(H.dtype)
        return Message({"V": V, "sigma": sigma, "B": H.T @ one_hot})

    def _random_features(self, seed: int) -> RandomFeatures:
        if self._features is None or self._features[0] != seed:
            problem = self._problem
            self._features = (
                seed,
                RandomFeatures(seed, problem.inputs, self._method.M, problem.dtype, problem.device),
            )
        return self._features[1]


class FedRANServer(Server):
    """Spatial merge over clients, temporal merge over tasks, exact B, ridge in the subspace (Alg. 1, lines 15-23)."""

    def __init__(self, method: FedRAN, problem: Problem) -> None:
        M = method.dimension(problem)
        empty = torch.zeros(M, 0, dtype=problem.dtype, device=problem.device)
        self._method = method
        self._problem = problem
        self._seed = derived_seed(problem.seed, "projection")
        self._features = RandomFeatures(self._seed, problem.inputs, method.M, problem.dtype, problem.device)
        self._state = Spectrum(empty, empty[0])
        self._B = empty
        self._W = empty
        self._columns = range(0)
        self._rank = 0 if method.rank is None else min(method.rank, M)
        self._spatial = self._merger()

    def _merger(self) -> Merger:
        return MERGERS[self._method.merge](self._rank)

    def start_task(self, task: Task) -> None:
        # A byte budget binds uploads, not what the server keeps, so a task with many classes never shrinks the state.
        self._rank = max(self._rank, self._method.feasible_rank(self._problem, len(task.new_columns)))
        self._columns = task.new_columns
        self._B = torch.nn.functional.pad(self._B, (0, task.columns_seen - self._B.shape[1]))
        self._spatial = self._merger()

    def broadcast(self, task: Task, round_: int) -> Message:
        """The projection as its seed (8 bytes), and the columns of the task's classes."""
        return Message({"seed": torch.tensor(self._seed), "columns": torch.tensor(task.new_columns, dtype=torch.int32)})

    def absorb(self, client_id: int, message: Message) -> None:
        self._B[:, self._columns.start : self._columns.stop] += message["B"]
        self._spatial.add(Spectrum(message["V"], message["sigma"]))

    def finish_task(self) -> None:
        spatial = self._spatial.result()
        if spatial is not None:
            self._state = merge([self._state, spatial], self._rank)[0]
        self._solve()

    def _solve(self) -> None:
        self._W = subspace_ridge(self._state, self._B, self._method.ridge)

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._features.map(inputs) @ self._W

    def model(self) -> dict[str, torch.Tensor]:
        projection = self._features.projection
        return {"W": self._W} if projection is None else {"W": self._W, "projection": projection}

    def state_dict(self) -> dict[str, torch.Tensor]:
        rank = torch.tensor(self._rank)
        return {"V": self._state.V, "sigma": self._state.sigma, "B": self._B, "rank": rank}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        problem = self._problem
        V, sigma, self._B = (state[name].to(problem.device, problem.dtype) for name in ("V", "sigma", "B"))
        self._state = Spectrum(V, sigma)
        self._rank = int(state["rank"])
        self._solve()
