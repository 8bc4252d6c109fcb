"""Health (https://grpc.io/docs/guides/health-checking/) and reflection, for probes, load balancers and grpcurl.

Both pass through the interceptor like all methods, which limits streams by number, address and lifetime. Reflection's
only method is a stream of requests, as its standard demands; each request counts as a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import aio as reflection

from protocol.wire import coordinator_pb2

NAME: str = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
LOOK_SECONDS = 1.0

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Health of the whole server ("") and of the coordinator's service."""

    def __init__(self):
        self.serving = True
        """False once the server is about to stop: probes report it."""

    def _status(self, service: str) -> Any:
        if service not in ("", NAME):
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self.serving else _Status.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f'ask for "" or "{NAME}"')
        return _Status(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        """Yield the status, and each change of it."""
        last = None
        while True:
            if (status := self._status(request.service)) != last:
                last = status
                yield _Status(status=status)
            await asyncio.sleep(LOOK_SECONDS)


class Reflection(reflection.ReflectionServicer):
    """Reflection: the server's services as descriptors. Unknown names are answered with NOT_FOUND."""

    def __init__(self):
        super().__init__((NAME, HEALTH, REFLECTION))

    def _file_containing_extension(self, request: Any, containing_type: Any, extension_number: Any) -> Any:
        return _unknown(request)  # there are none, and the library's own lookup fails on unknown names

    def _all_extension_numbers_of_type(self, request: Any, containing_type: Any) -> Any:
        return _unknown(request)


def _unknown(request: Any) -> Any:
    return reflection_pb2.ServerReflectionResponse(
        error_response=reflection_pb2.ErrorResponse(
            error_code=grpc.StatusCode.NOT_FOUND.value[0], error_message="there are no extensions"
        ),
        original_request=request,
    )
