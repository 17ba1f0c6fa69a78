"""What the engine reports of a run: the parts of run.json that it measures (see `execution.run_json` for the whole)."""

from __future__ import annotations

from typing import TypedDict


class Metrics(TypedDict):
    """Accuracies in percent (see `engine.metrics.metrics`); None: not defined for this stream.

    a[t, tau] is the accuracy on task tau's test set after task t, and T the number of tasks.
    """

    accuracy: list[float | None]  # [A_1 .. A_T], on the pooled test sets of the tasks up to t
    A_avg: float | None  # mean of A_1 .. A_T
    A_T: float | None
    A_avg_tasks: float | None  # the same two, with A_t = mean over tau <= t of a[t, tau] (STSA Eq. 60)
    A_T_tasks: float | None
    forgetting: float | None  # 1/(T-1) sum over tau < T of max over t < T of a[t, tau], minus a[T, tau] (STSA)
    forgetting_fedprotip: float | None  # the same sum over T
    retention: float | None  # R_T, the last of the series below (AFCL F.2)
    stability: float | None  # mean of S_2 .. S_T
    plasticity: float | None  # mean of P_1 .. P_T
    stability_by_task: list[float | None]  # [S_1 .. S_T], mean over tau < t of a[t, tau] (AFCL's tables F.4); S_1: None
    plasticity_by_task: list[float | None]  # [P_1 .. P_T], a[t, t]
    retention_by_task: list[float | None]  # [R_1 .. R_T], mean over tau <= t of a[t, tau] / a[tau, tau]


class Gate(TypedDict):
    """A sign that a run is no fair sample of its method (`engine.gates`)."""

    gate: str  # chance, growth, rising, idle_term, withdrawn
    task: int  # after which it was seen
    text: str


class GateState(TypedDict):
    """What the gates of a resumed run need."""

    found: list[Gate]
    starts: dict[str, float]  # root mean square of each watched tensor when the run began
    earlier: int | None  # right answers three quarters of the way through the current task


class BestRounds(TypedDict):
    """The best round of each task, chosen on test data: what some papers print, and never what A_t is."""

    every: int  # `evaluate_rounds`: every so many rounds of the model were tested, as in rounds.csv
    best: list[float | None]  # per task, the highest accuracy on all classes so far; None without test samples
    best_round: list[int | None]  # after which round that was, as uploads.csv counts them; the first of equals


class Raw(TypedDict):
    """What the samples would cost if clients sent them as they are, with labels, once (docs/explanation/privacy.md).

    They are those that clients learnt from: labelled ones, and unlabelled ones that they gave a label.
    """

    kind: str  # "features" in the wire's type; "images" in bytes, of a method that trains the network
    sample_bytes: int  # of one, with its label
    busiest_bytes: int  # of the client and task that `up_max_bytes` is of; of several, the one with most samples
    total_bytes: int  # of all clients and tasks that uploaded anything
    uploads: int  # how many clients and tasks these are
    larger: int  # of how many of them the upload, over all rounds of the task, is larger


class Revealed(TypedDict):
    """Single samples that left their clients within what they sent (docs/explanation/privacy.md)."""

    one_sample_sums: int  # class sums, means and other sums that were of one sample only
    one_sample_moments: int  # Gram matrices, covariances, their diagonals and subspaces that were
    revealed_samples: int  # distinct training samples of either


class Exchanged(TypedDict):
    """Bytes that clients sent and received (see `engine.ledger.Ledger.communication`)."""

    up_max_bytes: int  # the most that one client uploads for one task, over its rounds
    up_total_max_bytes: int  # the most that one client uploads over the stream
    down_max_bytes: int  # the most that one client receives for one task
    up_total_bytes: int  # all clients and tasks together
    down_total_bytes: int
    raw: Raw | None  # None where nobody sees the samples


class StageExchanged(TypedDict):
    """Bytes of one stage of a method's rounds."""

    up_max_bytes: int  # the most that one client uploads for one task in this stage
    up_max_bytes_by_task: list[int]  # that, of each task; 0 for a task without this stage
    up_total_bytes: int
    down_total_bytes: int


class StagesExchanged(Exchanged):
    """All bytes, and those of each stage by its name."""

    by_stage: dict[str, StageExchanged]


class LabelCounts(TypedDict):
    """Training samples of one task or of all; each client counts once per task."""

    samples: int
    labelled: int  # whose label the client knows
    accepted: int  # of the others, those that the client gave a label itself
    right: int | None  # of those labels, the true ones; None where nobody knows the truth


class BatchedTurns(TypedDict):
    """How often clients trained side by side (`parallel_clients`)."""

    turns_batched: int  # trained in one group with other clients
    turns_single: int  # all others, those that train nothing included
    single_because: list[str]  # why clients did not train together although it was asked for


class Absences(TypedDict):
    """Turns that brought no upload in time, by what became of the client; and the late uploads that arrived."""

    silent: int  # it did nothing
    gone: int  # it had left
    lost: int  # it did not answer in time, or its process was gone, and the round went on without it
    late: int  # its upload was on its way
    late_arrived: int
    late_absorbed: int  # of those that arrived; the others were of no use any more
    late_dropped: int  # of those that arrived, not what the server expected (`on_bad_upload: drop`)


class Guarantee(TypedDict):
    """What the noise in uploads promises (docs/explanation/noise.md): (epsilon, delta)-differential privacy."""

    epsilon: float | None  # null: none, the multiplier is 0
    delta: float
    unit: str  # what may be replaced: "sample", or "client" with all its samples
    clip: float  # L2 bound of a sample's H, or of a model update
    multiplier: float  # noise over sensitivity, of one release (of the sum of n uploads with `noise.share_of=n`)
    releases: int  # the most uploads in which one sample, or one client, was
    of_sums: bool  # whether it is of the sum of a round's uploads; else of each upload alone
    accountant: str | None  # name and version of the library; null where nothing was counted
    generator: str | None  # what drew the noise, and from what; null: there was none
    against_server: bool  # whether the server cannot subtract it; in a simulation it knows the seed


class Dropped(TypedDict):
    """Uploads that were not what the server expected and were left out (`on_bad_upload: drop`)."""

    uploads: int  # how many; uploads.csv says which
    clients: list[int]  # who sent them


class Seconds(TypedDict):
    """Wall-clock seconds of the method's own work, without evaluation (see `engine.ledger.Ledger.runtime`)."""

    seconds_per_task: float  # mean over tasks of (mean over clients of client time + server time), FedRAN Eq. 1
    client_seconds: float  # of all clients and tasks
    server_seconds: float  # of all tasks


class Compute(TypedDict):
    """Training compute of all clients, and of the server, whatever the machine (docs/reference/metrics.md)."""

    client_gradient_steps: int  # of optimisers, of all clients together
    client_samples_trained: int  # passed forward and backward: a sample counts in each epoch
    client_samples_forward: int  # passed forward alone: by teachers, for statistics, to select
    client_samples_extracted: int  # through the frozen backbone for their features: each once, cached or not
    server_gradient_steps: int
    server_samples_trained: int
    server_samples_forward: int  # evaluation left out


class TreeLevel(TypedDict):
    """The nodes of one level of a tree, and what went over the links above them; level 1 is next to the clients."""

    level: int
    nodes: int
    messages: int  # that they sent on, over all tasks and rounds
    up_bytes: int  # of these
    down_bytes: int  # of the broadcasts that they received
    seconds: float  # of their own: to check, to combine, to encode


class TreeReport(TypedDict):
    """Aggregators between the clients and the server (`transport=tree`), as in nodes.csv.

    What the server receives and sends is the last level's; the clients' own links are in `communication`.
    """

    fan_in: int
    levels: list[TreeLevel]  # none where the server has the clients themselves
    path_seconds: float  # of all rounds, along the slowest path to the server: clients and nodes side by side
