"""libp2p's daemon (p2pd, which hivemind brings): started under the peer's own key, watched, and ended with the node.

hivemind's `P2P` is used as it is, except for the following, which it has no option for (version 1.1.12):

- `_make_process_args`: the daemon outlives a parent that is killed. Here a watchdog starts it. And the daemon offers to
  relay strangers' traffic whatever `use_relay` says: `-relay=0` leaves its default. A configuration file ends that.
- `_log_p2pd_message`, `_read_outputs`: a failed start hides its cause, and a line that exceeds the reader's limit ends
  the reader, after which the daemon blocks on a full pipe.
- `control._pending_calls`: an answer that arrives in the instant in which its call times out ends hivemind's reader,
  and with it every later call.
- `control._handler_tasks`: handlers cancelled by their caller are never removed.
- `control._read_task`: nothing reports that the connection to the daemon broke.
- `_client.control.daemon_connector`: a dial that fails leaks a socket, and has no deadline.
- `_UNIX_SOCKET_PREFIX`: its sockets lie in a folder that all users share.
- `add_protobuf_handler`: handlers have no limits and no deadline, including those of hivemind's own DHT. One call may
  name any number of keys there, and the DHT looks all of them up without a pause. It unpacks a whole dictionary that
  somebody stores before it checks anything, and nested values in it end the process: the unpacker's C code recurses.
- `_child`, `_terminate`: its shutdown does not wait for the daemon's end.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import async_timeout
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.utils.logging import use_hivemind_log_handler

from peer.swarm.addresses import quic_beside
from peer.swarm.errors import PeerUnreachable, SwarmError, SwarmStartError, TooBusy, short_report
from peer.swarm.libp2p.ports import check_ports, reserved
from peer.swarm.rate_limiter import RateLimiter
from protocol.errors import CairnError, IdentityError, os_reason
from protocol.identity import Identity
from protocol.ids import PeerKey

log = logging.getLogger(__name__)

p2pd_pb2: Any = importlib.import_module(
    "hivemind.proto.p2pd_pb2"
)  # built at run time, so type checkers see an empty module

dht_pb2: Any = importlib.import_module("hivemind.proto.dht_pb2")

DHT_REQUESTS = (dht_pb2.PingRequest, dht_pb2.FindRequest, dht_pb2.StoreRequest)

MAX_DHT_KEYS = 1
"""Keys of one call to the DHT: the run's members have one, and ours ask for one node at a time."""

MAX_DHT_STORE = 32 * 1024
"""Bytes of one store in the DHT, which has one record. Whole tables, as hivemind's nodes hand them over, are refused:
members renew their records."""

STORE_COST = 15
"""Bytes that each byte of a store counts for besides its own. To check a record of 280 bytes takes 0.2 ms of a core.
A message that takes as long counts for 4 KiB."""

DAEMON_ERRORS = (P2PDaemonError, OSError, asyncio.IncompleteReadError)
"""hivemind raises these when the daemon refuses a request, or ends in the middle of one."""

START_SECONDS = 60
STARTS = 2
STOP_SECONDS = 3.5
MAX_SOCKET_FOLDER = 70
"""Bytes of the folder's path. A unix socket's path has at most 108, and the names in the folder need up to 30."""

# hivemind's own handler would write over our terminal view. Its records reach the handlers that are set up.
use_hivemind_log_handler("nowhere")


class _Nobody:
    """Takes the answer to a call for which nobody waits."""

    def set_result(self, result: object) -> None: ...

    def set_exception(self, exception: object) -> None: ...


class _Calls(dict):
    """hivemind's pending calls. Those whose future is done (cancelled by a timeout) have `_Nobody` in its place.

    hivemind's reader sets the result of every call that it finds here, and would end with an InvalidStateError. Of one
    that it does not find it formats the whole answer for its log, which takes seconds for 4 MiB.
    """

    def __contains__(self, call_id: object) -> bool:
        return True

    def __getitem__(self, call_id: Any) -> Any:
        future = self.get(call_id)
        return _Nobody() if future is None or future.done() else future


class _Tasks(dict):
    """hivemind's running handlers. Each is removed when it ends, even when its caller cancelled it."""

    def __setitem__(self, call_id: Any, task: asyncio.Task) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self.pop(call_id, None))


class Daemon(P2P):
    """One p2pd and the connection to it. Made by `start_daemon`."""

    folder: str = ""
    started: list[Daemon]
    _client: Any
    _child: Any
    peer_id: Any

    def __init__(self):
        super().__init__()
        self.limiter = RateLimiter()
        self.lines: deque[str] = deque(maxlen=20)
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the cause, when the daemon ends or its connection breaks."""
        self._stopping = False
        self.started.append(self)

    @property
    def pid(self) -> int:
        """The process id of the watchdog, which is the daemon's parent."""
        return self._child.pid

    # -- called by P2P.create ------------------------------------------------------------------------------------

    def _make_process_args(self, *args, **kwargs) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        watchdog = Path(__file__).with_name("watchdog.py")
        command = P2P._make_process_args(*args, **kwargs)
        configuration = Path(self.folder, "p2pd.json")
        configuration.write_text(json.dumps({"Relay": {"Enabled": False}}))
        return [
            sys.executable, "-I", "-S", str(watchdog), str(os.getpid()), self.folder, *command, f"-f={configuration}"
        ]  # fmt: skip

    def _log_p2pd_message(self, line: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.lines.append(line[:500])
        P2P._log_p2pd_message(line)

    async def _read_outputs(self, ready: asyncio.Future) -> None:
        while True:
            try:
                await super()._read_outputs(ready)
                break
            except ValueError:  # a line that exceeds the reader's limit is skipped
                continue
        self._note_loss("libp2p's daemon ended: " + (self.lines[-1] if self.lines else "it gave no reason"))

    def _note_loss(self, cause: str) -> None:
        if not self.lost.done() and not self._stopping:
            self.lost.set_result(cause)

    def harden(self, limiter: RateLimiter) -> None:
        """Repair hivemind's client, after creation and before the first call."""
        self.limiter = limiter
        control = self._client.control
        control._pending_calls = _Calls()
        control._handler_tasks = _Tasks()
        control._read_task.add_done_callback(lambda _: self._note_loss("the connection to libp2p's daemon broke"))

    # -- incoming and outgoing -----------------------------------------------------------------------------------

    async def add_protobuf_handler(self, name, handler, input_protobuf_type, **kwargs) -> None:
        """Accept calls as P2P does, with the sender's key checked, limits, and a deadline: also for the DHT's own."""

        async def limited(request: Any, context: P2PContext) -> Any:
            sender = sender_key(context.remote_id)
            with self.limiter.admit(sender, request.ByteSize()):
                self._check_dht_call(sender, request)
                if isinstance(request, dht_pb2.StoreRequest):
                    # Records are stored one by one. hivemind unpacks a dictionary before it checks anything, and what
                    # others put into its cache hides all that it stores.
                    refused = DHTProtocol.IS_DICTIONARY in request.subkeys or any(request.in_cache)
                    if refused or request.ByteSize() > MAX_DHT_STORE:
                        return dht_pb2.StoreResponse(store_ok=[False])  # after an error we would count as gone
                    self.limiter.charge(sender, STORE_COST * request.ByteSize(), work=True)
                try:
                    async with async_timeout.timeout(self.limiter.limits.handler_seconds):
                        answer = await handler(request, context)
                except (CairnError, asyncio.TimeoutError):
                    raise
                except Exception:
                    log.exception("a call of %s by %s failed here", name, sender.short)
                    raise SwarmError("internal error") from None  # the caller gets this text
                if isinstance(answer, dht_pb2.FindResponse):
                    self.limiter.charge_answer(sender, answer.ByteSize())
                return answer

        await super().add_protobuf_handler(name, limited, input_protobuf_type, **kwargs)

    def _check_dht_call(self, sender: PeerKey, request: Any) -> None:
        """Raise TooBusy for a call to the DHT that costs much: hivemind answers all keys of one without a pause.

        A ping may ask to be pinged in turn before it is answered, which holds a place for seconds: nobody needs it.
        """
        if isinstance(request, dht_pb2.PingRequest):
            request.validate = False
        if isinstance(request, DHT_REQUESTS) and len(request.peer.node_id) not in (0, DHTID.HASH_NBYTES):
            raise TooBusy("a call by a node of the DHT that names itself by something else than its id")
        if isinstance(request, (dht_pb2.FindRequest, dht_pb2.StoreRequest)) and len(request.keys) > MAX_DHT_KEYS:
            raise TooBusy(f"a call names {len(request.keys):,} keys: at most {MAX_DHT_KEYS} is answered")
        if isinstance(request, dht_pb2.FindRequest):
            self.limiter.check_answers(sender)

    async def call_bytes(self, peer: PeerKey, name: str, request: bytes) -> bytes:
        """Make a unary call. Raises hivemind's P2PDaemonError, P2PHandlerError."""
        answer = await self._client.call_unary_handler(PeerID(peer.libp2p_id), name, request)
        if answer is None:  # the other side ended the stream with something else than an answer
            raise P2PDaemonError("it gave no answer")
        return answer

    async def control(
        self, peer: PeerKey, request: Any, seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Make a request on a control connection of its own, and return the connection. Raises PeerUnreachable."""
        try:
            reader, writer = await self._client.control.daemon_connector.open_connection()
        except OSError as e:
            raise PeerUnreachable(f"libp2p's daemon does not answer: {os_reason(e)}") from None
        done = False

        async def answer() -> Any:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            return response

        try:
            async with async_timeout.timeout(seconds):
                response = await answer()
            if response.type == p2pd_pb2.Response.ERROR:
                raise PeerUnreachable(f"peer {peer.short}: {short_report(response.error.msg)}")
            if request.type == p2pd_pb2.Request.STREAM_OPEN and response.streamInfo.peer != peer.libp2p_id:
                raise PeerUnreachable(f"peer {peer.short}: the stream leads to another peer")
            done = True
            return reader, writer
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"peer {peer.short} could not be reached in {seconds:.0f} s") from None
        except (OSError, asyncio.IncompleteReadError) as e:
            raise PeerUnreachable(f"peer {peer.short}: libp2p's daemon hung up ({type(e).__name__})") from None
        finally:
            if not done:
                writer.close()

    async def stop(self) -> None:
        """End the daemon within STOP_SECONDS and a bit, and remove its folder. Idempotent."""
        self._stopping = True
        child = self._child
        self._terminate()
        if child is not None:
            try:
                async with async_timeout.timeout(STOP_SECONDS):
                    await child.wait()
            except asyncio.TimeoutError:
                with suppress(ProcessLookupError):
                    child.kill()  # p2pd gets SIGKILL with it
                await child.wait()
            child._transport.close()  # otherwise it complains when the loop closes
        shutil.rmtree(self.folder, ignore_errors=True)


def sender_key(peer_id: PeerID) -> PeerKey:
    """Return the caller's key, of which libp2p has a proof. Raises MalformedError for other key types."""
    return PeerKey.from_libp2p_id(peer_id.to_bytes())


async def start_daemon(
    identity: Identity,
    *,
    listen: Sequence[str],
    announce: Sequence[str],
    folder: Path | None,
    limiter: RateLimiter,
    start_seconds: float = START_SECONDS,
) -> Daemon:
    """Start a daemon whose libp2p identity is this key. Raises SwarmStartError after STARTS attempts.

    It listens at the TCP addresses of `listen`, and by QUIC at the same port numbers where UDP is free.
    """
    check_ports(listen)
    announce = [address for a in announce for address in (a, quic_beside(a)) if address is not None]
    causes: list[str] = []
    for _ in range(STARTS):
        try:
            with reserved(listen) as both:
                return await _start_once(identity, both, announce, folder, limiter, start_seconds)
        except DAEMON_ERRORS as e:
            causes.append(short_report(str(e)) or type(e).__name__)
            log.warning("libp2p's daemon did not start: %s", causes[-1])
    raise SwarmStartError(
        f"libp2p's daemon did not start, twice: {causes[-1]}; check that the listen address belongs to this machine, "
        "that the program may run (hivemind has one for x86-64 and one for ARM), and that the machine is not overloaded"
    )


async def _start_once(
    identity: Identity,
    listen: Sequence[str],
    announce: Sequence[str],
    folder: Path | None,
    limiter: RateLimiter,
    start_seconds: float,
) -> Daemon:
    private = _private_folder(folder)
    started: list[Daemon] = []
    kind = type("Daemon", (Daemon,), {"_UNIX_SOCKET_PREFIX": f"/unix{private}/", "folder": private, "started": started})
    try:
        key_file = Path(private, "key")
        _write_key(key_file, identity)
        daemon = await kind.create(
            host_maddrs=list(listen),
            announce_maddrs=list(announce) or None,
            identity_path=str(key_file),
            check_if_identity_free=False,  # it expects RSA, and peers may not have forgotten our previous process yet
            startup_timeout=start_seconds,
            use_relay=False,  # circuits carry no data here, and volunteers relay nobody's traffic
            nat_port_map=not any("/127.0.0.1/" in a for a in listen),
        )
        os.unlink(key_file)
        if not isinstance(daemon, Daemon) or daemon.peer_id.to_bytes() != identity.key.libp2p_id:
            raise IdentityError("libp2p's daemon runs under another key than the peer's: please report this")
        daemon.harden(limiter)
        return daemon
    except BaseException:
        for half in started:
            await half.stop()
        shutil.rmtree(private, ignore_errors=True)
        raise


def _write_key(path: Path, identity: Identity) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(identity.libp2p_private_key())


def _private_folder(folder: Path | None) -> str:
    """Return a new folder (0700) for the key and the sockets, with a path short enough for a unix socket."""
    parent = str(folder) if folder is not None else tempfile.gettempdir()
    if len(os.fsencode(parent)) + 20 > MAX_SOCKET_FOLDER:
        parent = "/tmp"
    return os.path.realpath(tempfile.mkdtemp(prefix="cairn-", dir=parent))
