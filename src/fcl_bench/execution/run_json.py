"""What run.json holds: every key, with its unit. CSV files and pictures lie beside it.

Accuracies are in percent, sizes in bytes and times in seconds, unless a key says otherwise; `null` means not defined.
Tasks, clients and rounds count from 0.
"""

from __future__ import annotations

from typing import Any, TypedDict

from fcl_bench.data.partitions.skew import Skew
from fcl_bench.engine import reports
from fcl_bench.environment import Environment

#: `protocol` unless a method says otherwise: test samples are classified one by one, without their task.
TASK_AGNOSTIC = "task-agnostic"


class Routing(TypedDict):
    """How well a method names the task of a test sample."""

    accuracy: list[float | None]  # after each task, percent of all test samples so far whose task it names
    by_task: list[float | None]  # after the last task, of each task's test samples
    unrouted: reports.Metrics  # where all classes compete, whatever task is named


class ValidationSamples(TypedDict):
    """Training samples that were held out (`data.validation`) and asked about like test samples."""

    share: float
    samples: int  # of all tasks
    replaces_test: bool  # `data.test=false`: every accuracy in this record is of these samples, none of the test set
    metrics: reports.Metrics | None  # on these samples, where the others are of the test set; else null


class Adaptation(reports.Exchanged):
    """The first stage (`adapt=fedavg`), whose costs are in no other part."""

    rounds: int
    accuracy: float | None  # of the network with its own head on the first task's test set
    client_seconds: float  # of all clients, when it was done
    server_seconds: float
    seconds: float  # that this run spent on it
    cache_hit: bool  # whether an earlier run had done it
    weights: str | None  # hash of the adapted network
    revealed: reports.Revealed  # as in `privacy`, of this stage


class Communication(reports.StagesExchanged):
    """What the method sent, the first stage left out."""

    wire: dict[str, str]  # how messages travel: dtype, factors, gram, columns, projection
    accounting: dict[str, float]  # MiB of an upload as a paper counts it, by the paper's convention


class Labels(reports.LabelCounts):
    """How many labels there were, over all tasks."""

    rate: float  # `label_rate`: the share of its labels that each client knows


class ClientAccuracy(TypedDict):
    """After the last task, over the clients: accuracy on each one's own mix of classes, as in client_accuracy.csv."""

    clients: int  # that have one
    mean: float
    std: float  # over the clients, all of them
    least: float
    most: float


class Precision(TypedDict):
    """The precision of networks' forward passes: float32, or bfloat16 or float16 under autocast; null for none."""

    method: str | None  # where the method trains: `method.training.precision`
    adapt: str | None  # of the first stage: `adapt.training.precision`
    features: str | None  # of a frozen network: `backbone.precision`


class Drift(TypedDict):
    """How far features moved, as in drift.csv."""

    last: list[float]  # after the last task, of each earlier one's reference samples: mean Euclidean distance
    mean: float | None  # of these


class Privacy(reports.Revealed):
    """What the server made, or came to know, of samples; what clients keep is in `client_samples_kept`.

    The first stage left out, which says its own.
    """

    synthetic_images: int  # that the server made from models alone and sent
    sample_gradients: int  # gradients of single samples that clients sent
    reconstructed_images: int  # that the server made of these
    guarantee: (
        reports.Guarantee | None
    )  # with `noise`: what it promises; the counts are as without it, 0 where sites keep them


class Runtime(reports.Seconds):
    """Seconds and memory. What interruptions took is left out."""

    feature_seconds: float  # that this run spent on extracting features
    feature_cost_seconds: float  # that they took when they were extracted
    feature_cache_hit: bool  # whether all features came from the cache
    # After each task, of all clients and the server so far: extracting features of the training samples included, at
    # what it cost when it was done, the first stage left out.
    cumulative_seconds: list[float]
    total_seconds: float  # from the start of the run to its record
    peak_memory_bytes: int  # allocated by torch on a GPU, resident in the process on a CPU


class AnyTransport(TypedDict):
    """What every transport reports."""

    name: str
    processes: int


class Transport(AnyTransport, total=False):
    """How the clients were reached; of `transport=tree` with all of a `TreeReport`."""

    backend: str  # of ranks: of torch.distributed
    ranks: list[dict[str, Any]]  # of each: what it runs
    withdrawn: list[dict[str, Any]]  # clients that were taken out: when, after which task, how many uploads
    nodes: list[dict[str, Any]]  # of a federation, of each: which clients it has, and what it runs
    arrivals: dict[str, int]  # with `transport.rounds=open`, how many uploads met which fate, as in arrivals.csv
    in_after: list[int]  # how many were in after each step
    fan_in: int
    levels: list[reports.TreeLevel]
    path_seconds: float


class Result(TypedDict):
    """A run record before its files are written."""

    schema: int  # version of the run folder's files
    run_id: str  # hash of everything that determines the result
    # The configuration; config.yaml has all of it.
    method: str
    method_revision: int  # version of what the method computes
    data: str
    backbone: str
    split: str
    partition: str
    adapt: str
    faults: str  # whether clients were made to fail, and how
    noise: str  # whether clients added noise, and which
    secure: str  # simulated sums: the server absorbed sums, under masks that are no secret; secure sums: that are; none
    experiment: str | None  # which of the papers' experiments the run belongs to
    track: str | None  # the leaderboard's track and its version, such as features-1
    profile: str  # of an experiment: full, or quick for its miniature
    seed: int
    beta: float | None  # concentration of the Dirichlet law; None where the partition does not use it
    clients: int  # K
    tasks: int  # T
    # What it ran on.
    data_fingerprint: str
    data_origin: str  # which files the data came from; empty where the name says it all
    unseen_test_samples: int  # of classes that are never learnt; they count in no accuracy
    class_samples: list[int]  # training samples of each class, in the order of their columns
    partition_skew: Skew
    features: dict[str, str]  # what determines the features, or the network that training starts from
    weights: str | None  # hash of the network that the features come from
    precision: Precision
    draws_weights: bool  # whether some of the initial weights differ between seeds
    checkpoint: str | None  # hash of the file with the weights that are not drawn; None where all or none are
    # What came out.
    protocol: str  # TASK_AGNOSTIC, or "task-pure batches of n"
    metrics: reports.Metrics  # on the test set; on validation samples where `validation.replaces_test`
    validation: ValidationSamples | None  # what was held out of training; null for nothing
    gates: list[reports.Gate]  # signs that the run is no fair sample of its method; none in a sound one
    task_aware: reports.Metrics  # with each test sample's task given
    routing: Routing | None  # of a method that names tasks
    client_accuracy: ClientAccuracy | None  # where somebody knows who holds what
    adaptation: Adaptation | None
    communication: Communication
    labels: Labels
    dropped: reports.Dropped
    bounds: list[dict[str, float | None]]  # what the method's audit found after each task, as in bounds.csv
    drift: Drift | None  # where it was measured
    rounds: reports.BestRounds | None  # with `evaluate_rounds`
    report: dict[str, Any]  # what the method adds
    client_storage_bytes: dict[str, int]  # the most that one client kept between its turns, by kind
    client_storage_max_bytes: int  # the same of all kinds together
    client_samples_kept: int  # the most raw samples (images, or features) that one client kept between its turns
    absences: reports.Absences
    batched_turns: reports.BatchedTurns
    privacy: Privacy
    compute: reports.Compute  # the first stage left out
    runtime: Runtime
    environment: Environment
    transport: Transport


class RunRecord(Result):
    """The whole file."""

    files: dict[str, str]  # name -> checksum of every other file of the folder but the log
    checksum: str  # of this file's content but this key
