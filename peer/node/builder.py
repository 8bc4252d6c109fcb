"""Construction of a node from its parts, bottom-up: each part gets the finished parts that it uses."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from peer.node.action_handler import ActionHandler
from peer.node.audit_disk import AuditDisk
from peer.node.audit_jobs import AuditJobs
from peer.node.audit_runner import AuditRunner
from peer.node.blob_retention import BlobRetention, assets
from peer.node.chain_store import ChainStore
from peer.node.device_work import DeviceWork
from peer.node.directive_handler import DirectiveHandler
from peer.node.driver import SLEPT_SECONDS, RoundDriver
from peer.node.end_of_run import EndOfRun
from peer.node.enrollment import Enrollment
from peer.node.events import EventQueue, NodeEvents
from peer.node.network import Network
from peer.node.node import Node
from peer.node.options import NodeOptions
from peer.node.packet_decoder import PacketDecoder
from peer.node.request_server import RequestServer
from peer.node.rest import RestWish
from peer.node.round_blob_fetcher import RoundBlobFetcher
from peer.node.round_timings import RoundTimings
from peer.node.shard_reducer import ShardReducer
from peer.node.slice_relay import SliceRelay
from peer.node.state_fetcher import StateFetcher
from peer.node.state_loader import StateLoader
from peer.node.status_reporter import StatusReporter, last_goodbye, local_status
from peer.node.tasks import Tasks
from peer.node.trainer_client import TrainerClient
from peer.node.trainer_supervisor import TrainerSupervisor
from peer.swarm import Swarm
from peer.swarm.pace import Paces
from protocol.codec import make_codec
from protocol.identity import Identity
from protocol.message_codec import KeySigner
from protocol.reduce import Reduction
from protocol.rounds.machine import RoundMachine
from protocol.rounds.policy import RoundPolicy

OBSERVED_RECORDS, OBSERVED_BYTES = 200_000, 2**31
"""The chain in an observer's memory: its coordinator may have to catch up from far behind."""


def load_chain(membership: Enrollment, options: NodeOptions) -> ChainStore:
    """Return the chain in the store, for `build_node`. Raises StoreError, also when the store is closed meanwhile.

    Ten thousand rounds of 256 peers take minutes: call it in a thread.
    """
    limits = RoundPolicy.of(membership.spec).chain_limits
    if options.observer:
        limits = replace(limits, max_records=OBSERVED_RECORDS, max_bytes=OBSERVED_BYTES)
    gc.disable()  # millions of objects stay: to visit them again and again takes a third of the time, and all threads'
    try:
        return ChainStore(membership.store, membership.decoder, membership.spec, limits)
    finally:
        gc.enable()


def build_node(
    membership: Enrollment,
    options: NodeOptions,
    certificates: ChainStore,
    bus: NodeEvents | None = None,
    *,
    owner: Identity | None = None,
    rest: RestWish | None = None,
    paces: Paces | None = None,
    start_swarm: Callable[..., Any] = Swarm.start,
    supervise: Callable[..., TrainerSupervisor] = TrainerSupervisor,
) -> Node:
    """Return a node that is ready to run. Raises StoreError.

    `certificates` are those of `load_chain`, with the same membership and options. `bus` receives the node's events.
    The key of `owner`, the run's, signs the reports on audits instead of the node's own. `rest` says when a peer is to
    rest, `paces` how fast it sends and gets blobs. `start_swarm` and `supervise` replace the network and the trainer's
    process.
    """
    spec, store, me = membership.spec, membership.store, membership.identity.key
    bus, rest = bus or NodeEvents(), rest or RestWish()
    tasks, queue, timings = Tasks(), EventQueue(bus), RoundTimings()
    codec = make_codec(spec.codec, spec.model.layout)
    reduction = Reduction(codec)

    makes_audits = options.makes_audits(replayable=spec.audit.replayable)
    signer = KeySigner(membership.identity)
    report_signer = None
    if makes_audits:
        report_signer = signer if owner is None else KeySigner(owner)
    policy = RoundPolicy.of(spec)
    chain = certificates.chain
    machine = RoundMachine(
        policy,
        spec.run_id,
        signer,
        chain,
        now=time.monotonic(),
        observer=not options.trains,
        blob_size=codec.size,
        assets=assets(spec),
        report_signer=report_signer,
        announced=certificates.own_header(me, time.time()),
    )
    paces = paces or Paces()
    network = Network(membership, tasks, options.listen, options.announce, chain.is_banned, start_swarm, paces=paces)
    packets = PacketDecoder(membership.decoder, membership.locator, chain.is_old)

    updates = RoundBlobFetcher(store, network, codec, spec.round.exchange_seconds, queue.post, tasks)
    reducer = ShardReducer(store, network, updates, reduction, codec.size, spec.outer, queue.post, tasks)
    slice_relay = SliceRelay(me, store, network, reduction, codec.size, spec.round, machine, tasks)
    files = StateFetcher(spec, me, store, network, updates, reducer)
    retention = BlobRetention(spec, store, updates, lambda: {*machine.retained_blobs(), *reducer.retained_blobs()})
    # An observer makes checks only for a user who waits for them: the store's limit alone bounds their files.
    disk = None if options.observer else AuditDisk(spec, store, chain, files, retention.prune, options.trains)
    jobs = AuditJobs(spec, options, store, chain, updates, files, retention, disk)
    auditor = None
    if makes_audits:
        auditor = AuditRunner(spec, me, chain, jobs, queue.post, None if options.trains else retention)

    trainer = None
    if options.trains:
        loader = StateLoader(spec, me, store, chain, updates, files, queue.post)
        trainer = TrainerClient(
            spec, me, options, store, chain, updates, retention, loader, tasks, queue.post, rest, network.paces.down,
            supervise,
        )  # fmt: skip
    work = DeviceWork(trainer, auditor, jobs, rest, tasks, queue.post)
    directives = DirectiveHandler(me, spec.data.window_tokens, trainer, (updates, network.peers))
    end = EndOfRun(membership, machine)
    handler = ActionHandler(
        store, network, packets, certificates, updates, reducer, directives, work, end, queue, tasks, bus
    )  # fmt: skip
    status = partial(
        local_status, membership, network, trainer, end, goodbye=last_goodbye(store), is_peer=not options.observer,
        shows_device=options.shows_device,
    )  # fmt: skip
    slept_seconds = max(SLEPT_SECONDS, spec.round.member_seconds) if options.trains else math.inf
    driver = RoundDriver(machine, handler, queue, bus, timings, status=status, slept_seconds=slept_seconds)
    requests = RequestServer(membership, packets, network, machine, certificates, slice_relay, queue, bus)
    folder = options.folder
    status_reporter = StatusReporter(membership, folder, network, machine, directives, timings, work, bus)
    return Node(membership, network, retention, work, driver, requests, status_reporter, end, bus, tasks)
