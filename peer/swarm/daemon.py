"""libp2p's daemon (p2pd, which hivemind brings): started under the peer's own key, watched, and ended with the node.

hivemind's `P2P` is used as it is, but for five things that it leaves open: the daemon outliving a killed parent, call
futures that a timeout cancels in the same instant as the answer comes (its reader dies of that), sockets that leak when
a dial fails, handlers without limits, and a failed start whose cause is lost.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import async_timeout
from google.protobuf.message import Message
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.utils.logging import use_hivemind_log_handler

from peer.swarm.addresses import quic_beside
from peer.swarm.errors import PeerUnreachable, SwarmError, SwarmStartError, libp2p_words
from peer.swarm.limits import Guard, Limits
from peer.swarm.listening import check_ports, reserved
from protocol.errors import CairnError, IdentityError
from protocol.identity import Identity
from protocol.ids import PeerKey

log = logging.getLogger(__name__)

p2pd_pb2: Any = importlib.import_module("hivemind.proto.p2pd_pb2")  # built at run time: type checkers see nothing in it

START_SECONDS = 60
STOP_SECONDS = 3.5
MAX_SOCKET_FOLDER = 70
"""A unix socket's path has at most 108 bytes; the names in the folder take up to 30."""

M = TypeVar("M", bound=Message)
StreamHandler = Callable[[PeerKey, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

# hivemind's own handler would write past our terminal view; its records go to whatever logging is set up.
use_hivemind_log_handler("nowhere")


class _Calls(dict):
    """hivemind's pending calls. One whose future is done already (cancelled by a timeout) is not there for its reader,
    which otherwise sets a result on it and dies of the InvalidStateError, and with it every later call."""

    def __contains__(self, call_id: object) -> bool:
        future = self.get(call_id)
        return future is not None and not future.done()


class _Tasks(dict):
    """hivemind's running handlers. They leave when they end, also when the caller cancelled them."""

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
        self.guard = Guard()
        self.lines: deque[str] = deque(maxlen=20)
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the cause, when the daemon ends or its connection breaks."""
        self._stopping = False
        self.started.append(self)

    # -- what P2P.create calls on its way ------------------------------------------------------------------------

    def _make_process_args(self, *args, **kwargs) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        watchdog = Path(__file__).with_name("watchdog.py")
        command = P2P._make_process_args(*args, **kwargs)
        return [sys.executable, "-I", "-S", str(watchdog), str(os.getpid()), self.folder, *command]

    def _log_p2pd_message(self, line: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.lines.append(line[:500])
        P2P._log_p2pd_message(line)

    async def _read_outputs(self, ready: asyncio.Future) -> None:
        while True:
            try:
                await super()._read_outputs(ready)
                break
            except ValueError:  # a line longer than the reader takes: skipped; the pipe must not fill up
                continue
        self._note_loss("libp2p's daemon ended: " + (self.lines[-1] if self.lines else "it said nothing"))

    def _note_loss(self, cause: str) -> None:
        if not self.lost.done() and not self._stopping:
            self.lost.set_result(cause)

    def harden(self, limits: Limits) -> None:
        """After creation, before the first call."""
        self.guard = Guard(limits)
        control = self._client.control
        control._pending_calls = _Calls()
        control._handler_tasks = _Tasks()
        control._read_task.add_done_callback(lambda _: self._note_loss("the connection to libp2p's daemon broke"))

    # -- calls in ------------------------------------------------------------------------------------------------

    async def add_protobuf_handler(self, name, handler, input_protobuf_type, **kwargs) -> None:
        """As in P2P, with the sender's key checked, limits, and a deadline: also for the DHT's own handlers."""

        async def guarded(request: Any, context: P2PContext) -> Any:
            sender = sender_key(context.remote_id)
            with self.guard.admit(sender, request.ByteSize()):
                try:
                    async with async_timeout.timeout(self.guard.limits.handler_seconds):
                        return await handler(request, context)
                except (CairnError, asyncio.TimeoutError):
                    raise
                except Exception:
                    log.exception("a call of %s by %s failed here", name, sender.short)
                    raise SwarmError("internal error") from None  # what the caller gets to see

        await super().add_protobuf_handler(name, guarded, input_protobuf_type, **kwargs)

    async def accept_streams(self, name: str, handler: StreamHandler) -> None:
        """Binary streams opened by others under this name. The writer is closed when the handler returns."""

        async def accept(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(sender_key(info.peer_id), reader, writer)
            except (CairnError, OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as e:
                log.info("stream %s from %s ended: %s", name, info.peer_id, str(e) or type(e).__name__)
            finally:
                writer.close()

        await self.add_binary_stream_handler(name, accept)

    # -- calls out -----------------------------------------------------------------------------------------------

    async def dial(self, peer: PeerKey, addresses: Sequence[bytes], seconds: float) -> None:
        """Connect to a peer at binary multiaddresses. Raises PeerUnreachable."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(peer=peer.libp2p_id, addrs=list(addresses)),
        )
        _, writer = await self._control(peer, request, seconds)
        writer.close()

    async def call(self, peer: PeerKey, name: str, message: Message, reply: type[M]) -> M:
        """A unary call. No deadline: the caller's. Raises hivemind's P2PDaemonError, P2PHandlerError; DecodeError."""
        answer = await self._client.call_unary_handler(PeerID(peer.libp2p_id), name, message.SerializeToString())
        return reply.FromString(answer)

    async def open_stream(
        self, peer: PeerKey, name: str, seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A binary stream to a peer's handler of that name. Raises PeerUnreachable."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=peer.libp2p_id, proto=[name]),
        )
        return await self._control(peer, request, seconds)

    async def _control(
        self, peer: PeerKey, request: Any, seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One request on a control connection of its own, closed again unless it went well."""
        try:
            reader, writer = await self._client.control.daemon_connector.open_connection()
        except OSError as e:
            raise PeerUnreachable(f"libp2p's daemon does not answer: {e.strerror or e}") from None
        done = False

        async def ask() -> Any:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            return response

        try:
            async with async_timeout.timeout(seconds):
                response = await ask()
            if response.type == p2pd_pb2.Response.ERROR:
                raise PeerUnreachable(f"peer {peer.short}: {libp2p_words(response.error.msg)}")
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

    # -- the end -------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End the daemon and clear its folder, within STOP_SECONDS and a bit."""
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
            child._transport.close()  # else it complains when the loop closes
        shutil.rmtree(self.folder, ignore_errors=True)


def sender_key(peer_id: PeerID) -> PeerKey:
    """The key of whoever called. libp2p has proved that they hold it. Raises MalformedError for other key types."""
    return PeerKey.from_libp2p_id(peer_id.to_bytes())


async def start_daemon(
    identity: Identity,
    *,
    listen: Sequence[str],
    announce: Sequence[str],
    folder: Path | None,
    limits: Limits,
    start_seconds: float = START_SECONDS,
) -> Daemon:
    """A running daemon whose libp2p identity is this key. It listens at the TCP addresses of `listen` and by QUIC at
    the same port numbers, where UDP is to be had. Raises SwarmStartError after two attempts."""
    check_ports(listen)
    announce = [way for a in announce for way in (a, quic_beside(a)) if way is not None]
    causes: list[str] = []
    for _ in range(2):
        try:
            with reserved(listen) as both:
                return await _start_once(identity, both, announce, folder, limits, start_seconds)
        except (P2PDaemonError, OSError) as e:
            causes.append(libp2p_words(str(e)))
            log.warning("libp2p's daemon did not start: %s", causes[-1])
    raise SwarmStartError(
        f"libp2p's daemon did not start, twice: {causes[-1]}; check that the listen address belongs to this machine, "
        "that the program may run (on a machine other than Linux x86-64, hivemind must be built from source), and that "
        "the machine is not overloaded"
    )


async def _start_once(
    identity: Identity,
    listen: Sequence[str],
    announce: Sequence[str],
    folder: Path | None,
    limits: Limits,
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
            check_if_identity_free=False,  # expects RSA; and our own earlier self may not be forgotten yet
            startup_timeout=start_seconds,
            use_relay=False,  # circuits carry no data here, and volunteers relay nobody's traffic
            nat_port_map=not any("/127.0.0.1/" in a for a in listen),
        )
        os.unlink(key_file)
        if not isinstance(daemon, Daemon) or daemon.peer_id.to_bytes() != identity.key.libp2p_id:
            raise IdentityError("libp2p's daemon runs under another key than the peer's: please report this")
        daemon.harden(limits)
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
    """A new folder (0700) for the key and the sockets, with a path short enough for a unix socket."""
    parent = str(folder) if folder is not None else tempfile.gettempdir()
    if len(os.fsencode(parent)) + 20 > MAX_SOCKET_FOLDER:
        parent = "/tmp"
    return os.path.realpath(tempfile.mkdtemp(prefix="cairn-", dir=parent))
