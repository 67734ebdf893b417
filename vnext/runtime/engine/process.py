"""The engine core's life in its process (main.py): from settings and starting ranks to the exit status.

Owns start-up and end: cache size, log, socket, signals. The ranks report the facts of the model, so this process needs no
torch. Waits in the kernel while nothing happens. A start that fails sends its one sentence to every client that says hello;
a broken engine names the location of its log. exits.py defines the exit statuses.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import zmq

from vnext.base.exits import DONE, FAILED, FOLLOWED, REFUSED
from vnext.base.spelling import reason
from vnext.media.store import FOLDER
from vnext.media.vectors import DISK_SHARE
from vnext.models.errors import ModelError
from vnext.runtime.engine.clients import MESSAGES_AHEAD_MAX, Clients, read_messages
from vnext.runtime.engine.engine_core import EngineCore
from vnext.runtime.engine.executor import STOP_GRACE_S, Executor, InprocExecutor, MpExecutor
from vnext.runtime.engine.facilities import Held
from vnext.runtime.engine.handovers import ticket_of
from vnext.runtime.engine.progress import RanksStalled
from vnext.runtime.engine.recovery import NoMoreRanks, Recovery
from vnext.runtime.engine.sizing import require_policy, scheduler_config
from vnext.runtime.engine.tiers import opening
from vnext.runtime.hosts.master import HostedExecutor, Hosts, MeetingPlace
from vnext.runtime.hosts.placer import Placer
from vnext.runtime.hosts.wire import secret_of
from vnext.runtime.processes.determinism import prepare_process
from vnext.runtime.processes.rank_processes import start_ranks, threads_of
from vnext.runtime.processes.readable import readable
from vnext.runtime.processes.run_dir import LEAVE, READY, REFUSAL, CoreNotes, shared_twin
from vnext.runtime.processes.standby import STANDBY, Standby
from vnext.runtime.processes.subprocesses import Child, ChildDied, RankStartFailed, terminate_all
from vnext.runtime.protocol.log_lines import begin
from vnext.runtime.protocol.messages import EngineDied, EngineReady, RankReady, derived_seed, encoder
from vnext.runtime.protocol.settings import (
    OFF,
    CoreSettings,
    EngineSettings,
    GpuSettings,
    RankSettings,
    SettingsError,
    reads_generation_config,
)
from vnext.runtime.protocol.speculation import WITH_LAYERS, speculation_of
from vnext.runtime.record.held import frames_held
from vnext.runtime.record.recorder import LogLost, Recorder
from vnext.runtime.record.segments import Bounds, LogUnwritable
from vnext.runtime.transport.ring.common import RingClosed
from vnext.state.config import MEASURED
from vnext.state.errors import IllegalEvent, LawBroken
from vnext.state.events import EngineRecovered, EngineStarted

REFUSALS = (ModelError, SettingsError, RankStartFailed, LogUnwritable)
START_ERRORS = (*REFUSALS, ChildDied, OSError)
DEATHS = (ChildDied, LawBroken, IllegalEvent, LogLost, RingClosed, RuntimeError)
LAST_DEATHS = (ChildDied, LogLost, RanksStalled, NoMoreRanks)
"""What another engine core would meet too: ranks have ended more often than they may, or the log cannot be written."""
FAREWELL_MS = 1500


def run(settings: CoreSettings, ranks: Sequence[Child]) -> int:
    """Start the engine with its ranks' processes and serve until a signal arrives; returns the exit status."""
    begin("engine core", settings.engine.log_format, "warning", "%(levelname)s %(name)s: %(message)s")
    with wake_on_signals() as wake:
        return run_until(wake, settings, ranks, partial(leave_on_sigterm, wake))


def run_until(
    wake: socket.socket,
    settings: CoreSettings,
    ranks: Sequence[Child] = (),
    interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run an engine core from its start, which is `interruptible`, until `wake` becomes readable; returns the exit status."""
    with (
        zmq.Context() as context, context.socket(zmq.ROUTER) as front, hosts_of(settings) as hosts,
        closing(Standby(partial(start_ranks, settings.engine, (), (STANDBY,)))) as standby,
    ):  # fmt: skip
        front.set(zmq.SNDHWM, MESSAGES_AHEAD_MAX)
        front.set(zmq.LINGER, FAREWELL_MS)
        front.bind(settings.address)
        if isinstance(executor := executor_or_status(settings, ranks, hosts, front, wake), int):
            return executor
        try:
            with interruptible():
                again = partial(other_ranks, settings, hosts, standby) if settings.engine.executor != "inproc" else None
                core, clients = start_core(settings, executor, front, again)
            if settings.engine.is_held_ready:
                standby.prepare()
        except SystemExit:
            executor.stop()
            raise
        except START_ERRORS as error:
            status = report_failed_start(error, settings, front, wake.fileno())
            executor.stop()
            return status
        grace_s = STOP_GRACE_S
        try:
            return serve(core, front, wake.fileno())
        except DEATHS as error:
            grace_s = 0.0 if isinstance(error, RanksStalled) else grace_s
            core.record_end()
            is_followed = settings.engine.max_restarts > 0 and not isinstance(error, LAST_DEATHS)
            report_end(error, clients, settings, is_followed)
            return FOLLOWED if is_followed else FAILED
        finally:
            core.stop_ranks(grace_s)


def report_failed_start(error: Exception, settings: CoreSettings, front: zmq.Socket[bytes], wake: int) -> int:
    """Note the error, and tell it to clients unless another engine core follows; returns the exit status."""
    refused = isinstance(error, REFUSALS)
    before, notes = settings.predecessor, CoreNotes(settings.run_dir)
    is_followed = before is not None and (before.replaced or not refused)
    notes.write(REFUSAL, reason(error, with_file=True))
    if not is_followed:
        report_death(front, wake, EngineDied(message=reason(error, with_file=True), refused=refused))
    return REFUSED if refused else FOLLOWED if is_followed else FAILED


def report_end(error: Exception, clients: Clients, settings: CoreSettings, is_followed: bool) -> None:
    """Name the error that stopped the engine, and the log that led to it, to all clients and on stderr."""
    where = f" The log that led to it is in {settings.log_dir}." if settings.engine.log != OFF else ""
    clients.tell_all(EngineDied(message=f"The engine stopped: {reason(error, with_file=True)}.{where}", is_followed=is_followed))
    if isinstance(error, LAST_DEATHS):  # not a bug here, so a traceback would not help
        logging.error("the engine stopped: %s.%s", reason(error, with_file=True), where)
    else:
        logging.exception("the engine stopped.%s", where)


@contextmanager
def wake_on_signals() -> Iterator[socket.socket]:
    """A socket from which one byte can be read for each SIGTERM and LEAVE, the number of the signal, which has no other effect.
    Afterwards both are ignored.

    The process then ends by itself: a late signal must not write to a closed socket.
    """
    wake, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, LEAVE):
        signal.signal(number, lambda number, frame: None)
    with wake, writer:
        try:
            yield wake
        finally:
            for number in (signal.SIGTERM, LEAVE):
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)


@contextmanager
def leave_on_sigterm(wake: socket.socket) -> Iterator[None]:
    """SIGTERM raises SystemExit, also one that made `wake` readable before: there is nothing yet to end in order."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(DONE)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        if readable((wake,), 0):
            raise SystemExit(DONE)
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


SAME_FOR_RANKS = (
    "ipc_bytes_max", "dtype", "quantization", "activations", "kv_cache_dtype", "max_model_len", "deterministic", "device", "numa",
    "block_size", "isa", "pipeline_parallel_size", "nnodes", "kv_disk_dir", "kv_disk_max_age_s", "handover_address",
    "cluster_secret_file", "packed_weights_dir", "family", "sampler", "attention_function", "enable_expert_parallel",
    "enable_expert_load", "enable_guidance",
)  # fmt: skip
"""Fields that an engine's settings and a rank's have alike."""


def executor_or_status(
    settings: CoreSettings, ranks: Sequence[Child], hosts: Hosts | None, front: zmq.Socket[bytes], wake: socket.socket
) -> Executor | int:
    """The executor; the exit status where there is no room for its ring. Then the ranks have ended, and clients know why."""
    try:
        return make_executor(settings, ranks, hosts)
    except OSError as error:
        terminate_all(ranks, grace_s=0.0)
        return report_failed_start(error, settings, front, wake.fileno())


def make_executor(settings: CoreSettings, ranks: Sequence[Child], hosts: Hosts | None = None, generation: int = 0) -> Executor:
    """The executor of ranks' processes, which have received nothing yet; without them, one rank in this process. Other ranks are on
    `hosts`. Raises OSError."""
    engine, meeting = settings.engine, MeetingPlace()
    threads, speculation = threads_of(engine), speculation_of(engine.speculative_config)
    alike = {name: getattr(engine, name) for name in SAME_FOR_RANKS} | handover_settings(settings)

    def settings_of(rank: int, ring: str, results_address: str, rendezvous: str) -> RankSettings:
        return RankSettings(
            rank=rank,
            world_size=engine.world_size,
            replica=settings.replica,
            replica_count=engine.data_parallel_size,
            follows=generation > 0 or settings.predecessor is not None,
            **alike,
            ring=ring,
            results_address=results_address,
            rendezvous=rendezvous,
            model_path=settings.model_path,
            threads=threads,
            kv_cache_bytes=engine.kv_cache_memory or 0,
            generation_config="auto" if reads_generation_config(engine) else "none",
            gpu=gpu_settings(engine, 0 if speculation is None else speculation.num_speculative_tokens),
            measures_draft_costs=speculation is not None and speculation.row_cost == MEASURED,
            max_lora_rank=engine.max_lora_rank if engine.enable_lora else 0,
            draft_path=settings.draft_path,
            draft_method=speculation.method if speculation is not None else "",
            returns_routed_experts=engine.enable_return_routed_experts,
            prefix_caching=engine.enable_prefix_caching,
            digests_weights=engine.log_weights_digest,
            store=meeting.store, link_key=meeting.link_key,
            host_address=meeting.address_of(rank // engine.local_world_size),
        )

    if engine.executor == "inproc":
        prepare_process(threads, engine.deterministic is not False)
        return InprocExecutor(settings_of(0, "", "", ""))
    local = MpExecutor(ranks, Path(settings.ranks_dir), settings_of, generation)
    return local if hosts is None else HostedExecutor(local, hosts, generation, meeting, engine, settings_of)


def handover_settings(settings: CoreSettings) -> dict[str, Any]:
    """What ranks need to know of hand-overs."""
    room = settings.engine.handover_bytes // settings.engine.world_size
    own = {"handover_dir": str(shared_twin(settings.run_dir)), "media_dir": f"{settings.run_dir}/{FOLDER}"}
    disk = settings.engine.kv_disk_dir
    own |= {"inputs_dir": disk or settings.inputs_dir}
    inputs = settings.engine.kv_disk_bytes // DISK_SHARE if disk else settings.engine.handover_bytes
    return {"role": settings.role, "handover_bytes": room, "inputs_bytes": inputs, **own}


def hosts_of(settings: CoreSettings) -> AbstractContextManager[Hosts | None]:
    """The hosts of an engine beside this one, until the context ends; None without any."""
    engine = settings.engine
    if engine.nnodes == 1:
        return nullcontext()
    others, secret_file = engine.nnodes - 1, engine.cluster_secret_file
    if engine.executor == "ray":
        placer = Placer(engine, Path(settings.run_dir))
        return closing(Hosts(placer.listens_at, 0, others, secret_file, placer))
    return closing(Hosts(engine.master_addr, engine.master_port, others, secret_file))


def other_ranks(settings: CoreSettings, hosts: Hosts | None, standby: Standby, generation: int) -> Executor:
    """An executor of new processes in the place of ranks that were lost. Raises OSError, with nothing started."""
    ranks = standby.take() or start_ranks(settings.engine)
    if settings.engine.is_held_ready:
        standby.prepare()
    try:
        return make_executor(settings, ranks, hosts, generation)
    except OSError:
        terminate_all(ranks, grace_s=0.0)
        raise


def gpu_settings(engine: EngineSettings, drafts_max: int) -> GpuSettings:
    """The engine's settings for ranks on GPUs. `drafts_max`: of a row in a step."""
    return GpuSettings(
        memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        graph_sizes=engine.graph_sizes,
        compile=engine.compile,
        attention=engine.attention,
        tokens_max=engine.step_tokens(on_gpu=True),
        rows_max=engine.max_num_seqs,
        drafts_max=drafts_max,
        adapters_max=engine.max_loras if engine.enable_lora else 0,
    )


def start_core(
    settings: CoreSettings, executor: Executor, front: zmq.Socket[bytes], again: Callable[[int], Executor] | None
) -> tuple[EngineCore, Clients]:
    """Load the ranks, size the cache, open the log. `again`: as that of Recovery. Raises one of START_ERRORS."""
    require_policy(settings.engine)
    before = settings.predecessor
    frames = frames_held(before.log) if before is not None else 0  # now: the ranks still import
    ranks = executor.start()
    started, engine = started_event(settings, ranks), settings.engine
    recorder = open_log(settings, started, log_bounds(engine))
    seed = secrets.randbits(64) if engine.seed is None else engine.seed % 2**64
    notes, secret = CoreNotes(settings.run_dir), secret_of(engine.cluster_secret_file) if engine.cluster_secret_file else b""
    ready = EngineReady(
        config=started.config,
        model=started.model,
        world_size=started.world_size,
        log_dir=settings.log_dir,
        environment=started.environment,
        model_digest=started.model_digest,
        linear_layers=ranks[0].linear_layers,
        max_restarts=engine.max_restarts,
        root_seed=seed if before is None else derived_seed(seed, before.number),
        blamed="" if before is None else before.blamed,
        replaces=before is not None and before.replaced,
        inputs_ticket=ticket_of(ranks[:1], engine.handover_transport, secret) if settings.role == "encode" else "",
    )
    clients = Clients(front, ready, ready.root_seed, notes, follows=before is not None)
    recovery = Recovery(again, engine.max_restarts, ranks, "" if engine.log == OFF else settings.log_dir)
    ticket = ticket_of(ranks, engine.handover_transport, secret) if settings.role == "prefill" else ""
    keepers = sum(ready.keeps_inputs for ready in ranks)
    held = Held(opening(ranks, engine.kv_disk_bytes), ticket, keepers)
    core = EngineCore(started, executor, recorder, clients, engine, recovery, held)
    if measures_drafts(engine, started):
        core.measure_draft_costs()
    if before is not None:
        core.begin_after(EngineRecovered(cause=before.cause, log=before.log, frames=frames))
    notes.write(READY)
    return core, clients


def measures_drafts(engine: EngineSettings, started: EngineStarted) -> bool:
    """Whether the times of served steps say what drafts cost: where that was left to measuring, of drafts that no model makes. On a
    GPU and in stages a step's time holds more than its own work."""
    speculation = speculation_of(engine.speculative_config)
    if speculation is None or speculation.row_cost != MEASURED or speculation.method in WITH_LAYERS:
        return False
    return started.environment.get("device", "cpu") == "cpu" and engine.pipeline_parallel_size == 1


def log_bounds(engine: EngineSettings) -> Bounds:
    return Bounds(
        max_bytes=engine.log_max_bytes, max_age_s=engine.log_max_age_s, timestamped=True, durable=engine.log_durable,
        compressed=engine.log_compress, required=engine.log_required, indexed=engine.log_index,
        starts_max=engine.log_keep, starts_bytes_max=engine.log_keep_bytes,
    )  # fmt: skip


def open_log(settings: CoreSettings, started: EngineStarted, bounds: Bounds) -> Recorder:
    """The log. Where other engine cores had one and the disk fails now, streams are worth more than a log, unless it is required.
    Raises LogUnwritable."""
    try:
        return Recorder.open(settings.log_dir, started, settings.engine.log, bounds)
    except LogUnwritable as error:
        before = settings.predecessor
        if before is None or before.replaced or bounds.required:
            raise
        logging.warning("The engine goes on without a log, until it is started again: %s", error)
        return Recorder.unopened(str(error))


def started_event(settings: CoreSettings, ranks: tuple[RankReady, ...]) -> EngineStarted:
    """With the model's folder where the model's name alone does not say which it is: options may have made it."""
    named, folder = os.path.abspath(os.path.expanduser(settings.engine.model)), os.path.abspath(settings.model_path)
    own = {"folder": folder} if settings.engine.model and folder != named else {}
    return EngineStarted(
        config=scheduler_config(settings.engine, ranks[0].model, ranks),
        model=settings.engine.model or "demo",
        model_digest=ranks[0].model_digest,
        world_size=len(ranks),
        environment=ranks[0].environment | own,
        started_ns=time.time_ns(),
    )


def serve(core: EngineCore, front: zmq.Socket[bytes], wake: int) -> int:
    """Run turn after turn until a signal arrives, and end in order; sleep in the kernel between turns. Returns the exit status."""
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(wake, zmq.POLLIN)
    core.watch(poller)
    while True:
        ready = dict(poller.poll(core.poll_timeout_ms))
        if wake in ready:
            break
        core.step(ready)
    if os.read(wake, 1)[0] == LEAVE:
        core.leave("The engine core is replaced by one with other settings.")
        return FOLLOWED
    core.shut_down()
    return DONE


def report_death(front: zmq.Socket[bytes], wake: int, farewell: EngineDied) -> None:
    """Tell clients that wait for EngineReady why there is no engine; the launcher then sends a signal."""
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(wake, zmq.POLLIN)
    while (ready := dict(poller.poll(FAREWELL_MS))) and wake not in ready:
        for peer, _ in read_messages(front.recv_multipart()):
            front.send_multipart((peer, encoder.encode(farewell)))
