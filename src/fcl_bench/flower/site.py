"""A node's view of a run: the same plan as the server's, and its own clients' samples."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fcl_bench import environment
from fcl_bench.backbones.extract import FeatureCache, Features, extract_features
from fcl_bench.config import Settings, load_settings
from fcl_bench.data.partitions.base import Holdings
from fcl_bench.data.sources.array_files import SiteFile
from fcl_bench.data.sources.image_source import rows_of
from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.transport import Clients
from fcl_bench.errors import UserError
from fcl_bench.execution.inputs import cache_folder, images_of, require_range
from fcl_bench.execution.options import clients_of, masking
from fcl_bench.execution.plan import Plan, context_of, make_plan, threads_of
from fcl_bench.files import locked, replacing, user_path, writable
from fcl_bench.flower.policy import Policy
from fcl_bench.flower.worker import Site
from fcl_bench.options.noise.secret import KEY

log = logging.getLogger(__name__)


def site_of(run: Mapping[str, Any], changes: Mapping[str, Any], own: Sequence[int], policy: Policy) -> Site:
    """The site of some clients.

    Args:
        run: what the server says of it: its resolved configuration under `config`.
        changes: keys that differ at this node, such as `data.path`, by their dotted names.
        own: the node's clients.
        policy: what the run may do here.

    Raises:
        UserError: the configuration, or the data here, can't work, or the policy forbids the run.
    """
    config = changed(run["config"], changes)
    policy.require_classes(config)
    settings = load_settings(OmegaConf.create(config))
    policy.require_run(settings, changes)
    if isinstance(settings.data, SiteFile):
        return _own_site(settings, settings.data, run, own)
    plan = make_plan(settings)
    clients = clients_of(plan)
    if beyond := [client for client in own if client >= clients.count]:
        raise UserError(f"clients={beyond[0]} is not in a run of clients={clients.count}", f"0 to {clients.count - 1}")
    return Site(clients, own_inputs(plan, clients.rows(own)), plan.fingerprint)


def _own_site(settings: Settings, data: SiteFile, run: Mapping[str, Any], own: Sequence[int]) -> Site:
    """The site of one client that has samples of its own; the server knows how many they are, and no more."""
    scalars = settings.scalars
    if len(own) != 1 or own[0] >= scalars.clients:
        raise UserError(
            f"clients={','.join(map(str, own))}: data.path holds the samples of one client of {scalars.clients}",
            f"one of 0 to {scalars.clients - 1}, and a node for each client",
        )
    # What determines the result is the server's to say. In a benchmark the ids of the run tell.
    if settings.identity() != load_settings(OmegaConf.create(dict(run["config"]))).identity():
        raise UserError(
            "a key of this node would change the result", "only paths, device and the cache may differ here"
        )
    held, device = data.read(), environment.choose_device(scalars.device)
    if held.x.shape[1] != run["inputs"]:
        raise UserError(
            f"data.path={data.path} has {held.x.shape[1]} features, the server's test samples {run['inputs']}",
            "features of the same backbone",
        )
    classes = run["classes"]
    for task in range(scalars.tasks):
        found = np.unique(held.column[(held.task == task) & held.labelled])
        if strange := sorted(set(found.tolist()) - set(classes[task])):
            raise UserError(
                f"data.path={data.path}: column {strange[0]} is no class of task {task}", f"{classes[task]}"
            )
    if len(held.task) and held.task.max() >= scalars.tasks:
        raise UserError(f"data.path={data.path} has the task {held.task.max()}", f"0 to {scalars.tasks - 1}")
    inputs = torch.from_numpy(held.x)
    context = context_of(settings, held.x.shape[1], device, bool(run["recurring"]))
    release, threads = settings.noise.release(settings.method, context), threads_of(settings, context, None)
    context = dataclasses.replace(context, release=release, threads=threads)
    require_range(Features(inputs, inputs[:0], 0.0, 0.0, False), context.dtype)
    nothing = np.zeros(0, dtype=np.int64)
    holdings = [
        Holdings.of(
            np.flatnonzero(held.task == task) if client == own[0] else nothing for client in range(scalars.clients)
        )
        for task in range(scalars.tasks)
    ]
    middleware: Sequence[Middleware] = ()
    noise, secret = None, _secret(settings)
    key = _key(secret, settings, run)
    if settings.noise.noisy:
        most = max(len(shards[own[0]]) for shards in holdings)
        middleware = settings.noise.middleware(settings.method, context, scalars.tasks, key, most)
        rounds = 1 if context.release is not None else cast(Any, settings.method).training.rounds
        epsilon = cast(Any, settings.noise).epsilon
        key_hash = hashlib.blake2b(key, digest_size=8).hexdigest()
        noise = {"key": key_hash, "epsilon": epsilon, "of_task": rounds, "of_run": rounds * scalars.tasks}
    middleware = [*middleware, *masking(settings, context, run["id"])]
    # Whoever knows all samples but one could try what the hash of the file is with each value of that one.
    fingerprint = hashlib.blake2b(held.fingerprint.encode(), digest_size=16, key=secret).hexdigest()
    about = {"run": run["id"], "stage": run["stage"], "classes": classes}
    clients = Clients(settings.method, context, holdings, held.column, held.labelled, middleware, **about)
    rows = clients.rows(own)
    # The order of the file would tell where in it a revealed sample stands.
    numbers = np.zeros(len(inputs), dtype=np.int64)
    numbers[rows] = np.random.default_rng(int.from_bytes(key, "little")).permutation(len(rows))
    return Site(clients, inputs[torch.from_numpy(rows)], fingerprint, noise, numbers)


def _secret(settings: Settings) -> bytes:
    """The secret of this node, which never leaves it: whoever has it could take the noise off again."""
    out = settings.scalars.out
    path = writable(f"out={out}", user_path("out", out) / "nodes") / "noise.secret"
    with locked(path.with_name(f".{path.name}.lock"), f"making {path}"):  # nodes of one machine may share it
        if not path.exists():
            with replacing(path, 0o600) as temporary:  # for this user alone
                temporary.write_bytes(secrets.token_bytes(KEY))
    secret = path.read_bytes()
    if len(secret) != KEY:
        raise UserError(f"{path} is damaged", "remove it: the node then makes another one")
    return secret


def _key(secret: bytes, settings: Settings, run: Mapping[str, Any]) -> bytes:
    """The key of this site's noise in a run.

    It comes from the secret, so that a turn done twice has the same noise, and from all that the server says of the
    run: the same noise under other settings would tell by its difference what is without it.
    """
    about = {key: value for key, value in run.items() if key != "config"} | {"settings": settings.identity()}
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=KEY, key=secret).digest()


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which some keys have other values.

    Raises:
        UserError: there is no such key.
    """
    whole = OmegaConf.create(dict(config), flags={"struct": True})
    for name, value in changes.items():
        try:
            OmegaConf.update(whole, name, value, merge=False)
        except (OmegaConfBaseException, ValueError) as error:
            remedy = "a key of the run's config.yaml, such as data.path"
            raise UserError(f"{name} is no key of this run", remedy) from error
    return cast("dict[str, Any]", OmegaConf.to_container(whole))


def own_inputs(plan: Plan, rows: np.ndarray) -> torch.Tensor:
    """The samples `rows` (m,) of the training data, as the method sees them; it reads no other samples.

    Only a frozen network sees all samples, in the batches in which it sees them in one process: a sample's features
    round by what else is in its batch. They are kept in the cache.
    """
    settings, dataset = plan.settings, plan.dealt.dataset
    if settings.method.trains_network:
        return images_of(plan, rows_of(dataset.train, rows))
    extractor = plan.extractor
    if extractor is None:
        raise UserError(f"adapt={settings.adapt.name} trains a first stage, which no node does", "adapt=none")
    if extractor.cacheable:
        folder = cache_folder(plan)
        cache = None if folder is None else FeatureCache(folder)
        with environment.choosing_kernels(plan.context.cudnn):
            whole = extract_features(settings.backbone.name, extractor, dataset, cache).train
        return whole[torch.from_numpy(rows)]
    return torch.cat(list(extractor.batches(rows_of(dataset.train, rows))))
