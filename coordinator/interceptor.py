"""The interceptor of every gRPC method: rates of calls and of answered bytes, deadlines, and malformed requests.

It wraps each method of the server. Limits by address come first, before a byte of the message is waited for. gRPC
itself waits for ever for a message that does not come, and for a caller that does not read the answer. Hundreds of
such calls would leave no room for honest ones. Here these calls end in time, and so do messages that do not parse. To
that end unary methods are registered as streams of bytes, which look the same on the wire.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import async_timeout
import grpc
import grpc.aio

from coordinator.errors import LedgerConflictError, LedgerError, RefusedError, TooManyError, UnknownRunError
from coordinator.limits import ConcurrencyLimit, NetworkLimit, Rate, RateLimit, caller_of, is_loopback, refuse_before
from protocol.checks import PARSE_ERRORS
from protocol.errors import AdmissionError, CairnError, MalformedError, SignatureError

log = logging.getLogger(__name__)
T = TypeVar("T")

CALLS = Rate(per_second=40, burst=400)
"""Calls of one address, of any method; a method may allow fewer. Messages of a stream count as calls."""

MIB = 1024 * 1024
ANSWERS = Rate(per_second=4 * MIB, burst=64 * MIB)
"""Bytes of the answers to one address. A reader of a long chain seldom waits: most connections are slower."""

ANSWERS_TO_ALL = Rate(per_second=16 * MIB, burst=256 * MIB)
"""Bytes of the answers to all: about 135 Mbit/s, which leaves room on a common uplink."""

BULKY = ("Status", "Certificates")
"""The methods with large answers. Only these are refused for what all were sent: joining a run goes on."""

CALLS_OF_ONE = 64
"""Concurrent calls of one address."""

OPEN = 4
"""Open calls, with those whose callers do not read the answer, for each that works."""

READ_SECONDS = 5.0
"""Seconds for a request to arrive completely."""

DEADLINE = 10.0
"""Seconds that any unary method may take, whatever the client asked for."""

CALL_SECONDS = 15.0
"""Seconds for a unary call and everything that it waits for: longer than READ_SECONDS or DEADLINE."""

STREAMS = 64
STREAMS_OF_ONE = 4
STREAM_SECONDS = 300.0
"""Lifetime of a stream (the client opens another); a silent one ends after IDLE_SECONDS."""

IDLE_SECONDS = 60.0

_CODES: tuple[tuple[type[CairnError], grpc.StatusCode], ...] = (
    (UnknownRunError, grpc.StatusCode.NOT_FOUND),
    (RefusedError, grpc.StatusCode.PERMISSION_DENIED),
    (AdmissionError, grpc.StatusCode.PERMISSION_DENIED),
    (SignatureError, grpc.StatusCode.UNAUTHENTICATED),
    (MalformedError, grpc.StatusCode.INVALID_ARGUMENT),
)
_NO_LEDGER = (
    "the coordinator's ledger cannot be written or read now, which is tried again (an order given just now may hold): "
    "its operator finds the reason in its log"
)
_FAULT = "the coordinator has a fault of its own: its operator finds the reason in its log"


class LimitsInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each method of a server. `counted(method, code, seconds)` is called after each call."""

    def __init__(self, counted: Callable[[str, str, float], None], max_calls: int):
        self._counted = counted
        self._rate = NetworkLimit(CALLS)
        self._answered = NetworkLimit(ANSWERS)
        self._answered_all = RateLimit(ANSWERS_TO_ALL, callers=1)
        self._calls = _Places(max_calls, CALLS_OF_ONE)
        self._streams = _Places(STREAMS, STREAMS_OF_ONE)
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}
        self._unknown = grpc.stream_stream_rpc_method_handler(self._no_such)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return the limited handler of the called method."""
        method = handler_call_details.method
        if (known := self._handlers.get(method)) is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None:
            return self._unknown
        short = method.rpartition("/")[2]
        if handler.request_streaming or handler.response_streaming:
            guarded = self._stream(short, handler)
        else:
            guarded = self._unary(short, handler)
        # As many as the server has methods: unknown names are not kept.
        self._handlers[method] = grpc.stream_stream_rpc_method_handler(guarded)
        return self._handlers[method]

    async def _no_such(self, _: Any, context: Any) -> None:
        async def work(_: str) -> None:
            raise _Ended(grpc.StatusCode.UNIMPLEMENTED, "the coordinator has no such method: update Cairn")

        await self._within("unknown", context, self._calls, work, 1.0)

    def _unary(self, method: str, handler: Any) -> Callable[[Any, Any], Awaitable[None]]:
        async def answer(_: Any, context: Any) -> None:
            async def work(caller: str) -> None:
                sent = await _in_time(context.read(), READ_SECONDS, "the request did not come")
                request = _parsed(handler.request_deserializer, sent)
                try:
                    async with async_timeout.timeout(DEADLINE):
                        reply = await handler.unary_unary(request, context)
                except asyncio.TimeoutError:
                    log.warning("%s took more than %.0f s", method, DEADLINE)
                    busy = "the coordinator is too busy: try again in a minute"
                    raise _Ended(grpc.StatusCode.DEADLINE_EXCEEDED, busy) from None
                await context.write(self._charged(caller, handler.response_serializer(reply)))

            await self._within(method, context, self._calls, work, CALL_SECONDS)

        return answer

    def _stream(self, method: str, handler: Any) -> Callable[[Any, Any], Awaitable[None]]:
        async def answer(_: Any, context: Any) -> None:
            async def work(caller: str) -> None:
                requests = self._requests(method, context, caller, handler.request_deserializer)
                if handler.request_streaming:
                    replies = handler.stream_stream(requests, context)
                else:
                    first = await anext(requests, None)
                    if first is None:
                        raise MalformedError("the call carries no request")
                    replies = handler.unary_stream(first, context)
                async for reply in replies:
                    answer = self._charged(caller, handler.response_serializer(reply))
                    await _in_time(context.write(answer), READ_SECONDS, "nobody reads")

            await self._within(method, context, self._streams, work, STREAM_SECONDS)

        return answer

    def _take(self, method: str, caller: str) -> None:
        """Count a call. Raises TooManyError, with the time to wait, for too many, or too many answered bytes."""
        now = time.monotonic()
        self._rate.take(caller, now)
        refuse_before(self._answered.wait(caller, now))
        if method in BULKY and not is_loopback(caller):
            refuse_before(self._answered_all.wait(None, now))

    def _charged(self, caller: str, answer: bytes) -> bytes:
        """Return an answer, after counting its bytes."""
        now = time.monotonic()
        self._answered.count(caller, now, len(answer))
        if not is_loopback(caller):
            self._answered_all.count(None, now, len(answer))
        return answer

    async def _requests(
        self, method: str, context: Any, caller: str, parse: Callable[[bytes], Any]
    ) -> AsyncIterator[Any]:
        """Yield the messages of a stream, each of which counts as a call."""
        while True:
            sent = await _in_time(context.read(), IDLE_SECONDS, "the stream was silent for too long")
            if not isinstance(sent, bytes):  # the end of the stream
                return
            self._take(method, caller)
            yield _parsed(parse, sent)

    async def _within(
        self,
        method: str,
        context: Any,
        places: _Places,
        work: Callable[[str], Awaitable[None]],
        seconds: float,
    ) -> None:
        """Do the work, or end the call with the status and message that say why."""
        began, caller = time.monotonic(), caller_of(context.peer())
        code, message = grpc.StatusCode.OK, ""
        try:
            self._take(method, caller)
            # Freed only when the call is over: a caller that does not read its answer keeps its network's place.
            free = places.open.take(caller)
            context.add_done_callback(lambda _: free())
            with places.working():
                async with async_timeout.timeout(seconds):
                    await work(caller)
        except asyncio.TimeoutError:
            code, message = grpc.StatusCode.DEADLINE_EXCEEDED, "the call took too long and was ended: call again"
        except _Ended as e:
            code, message = e.code, str(e)
        except TooManyError as e:  # counted only: a flood must not fill the log
            code, message = grpc.StatusCode.RESOURCE_EXHAUSTED, str(e)
        except CairnError as e:
            known = next((c for kind, c in _CODES if isinstance(e, kind)), None)
            if known is not None:
                code, message = known, str(e)
            elif isinstance(e, LedgerError) and not isinstance(e, LedgerConflictError):
                # It is away: callers go on as without a coordinator, and ask again.
                code, message = grpc.StatusCode.UNAVAILABLE, _NO_LEDGER
            else:
                code, message = grpc.StatusCode.INTERNAL, _FAULT
            # A failing disk or ledger is for the operator to read, not for strangers. As the log limits each statement,
            # with one for both a flood of refusals would hide it.
            if known is None:
                log.error("%s from %s has failed: %s", method, caller, e)
            else:
                log.info("%s from %s: %s", method, caller, e)
        except asyncio.CancelledError:  # the client left
            self._counted(method, grpc.StatusCode.CANCELLED.name, time.monotonic() - began)
            raise
        except grpc.aio.AbortError:  # the method has reported the error
            found = next((c.name for c in grpc.StatusCode if c.value[0] == context.code()), "UNKNOWN")
            self._counted(method, found, time.monotonic() - began)
            raise
        except Exception:  # a bug: logged here; strangers learn nothing of the inside
            log.exception("%s failed", method)
            code, message = grpc.StatusCode.INTERNAL, _FAULT
        self._counted(method, code.name, time.monotonic() - began)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, message)


class _Places:
    """The places of calls: all that work at once, and those of each network until its calls are over."""

    def __init__(self, total: int, per_caller: int):
        self.open = ConcurrencyLimit(OPEN * total, per_caller)
        self._working = ConcurrencyLimit(total, total)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold a place among all that work. Raises TooManyError."""
        free = self._working.take(None)
        try:
            yield
        finally:
            free()


class _Ended(Exception):
    """An end of a call by the interceptor's own checks."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


def _parsed(parse: Callable[[bytes], T], sent: Any) -> T:
    if not isinstance(sent, bytes):  # the end of the stream
        raise MalformedError("the call carries no request")
    try:
        return parse(sent)
    except PARSE_ERRORS:
        raise MalformedError("the request is no message of this method: update Cairn") from None


async def _in_time(work: Awaitable[T], seconds: float, otherwise: str) -> T:
    try:
        async with async_timeout.timeout(seconds):
            return await work
    except asyncio.TimeoutError:
        raise _Ended(grpc.StatusCode.DEADLINE_EXCEEDED, f"{otherwise} within {seconds:.0f} s") from None
