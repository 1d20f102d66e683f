"""The HTTP server for operators, on a port of its own: metrics, probes, and the state of the pods."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton_common.exposition import exposition

from ..endpoints.services import Services
from ..routing.pods import Pod


class AdminServer(uvicorn.Server):
    """Runs beside the server for clients, which handles the signals of the process."""

    def __init__(self, services: Services) -> None:
        app = create_admin(services)
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="off"))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def create_admin(services: Services) -> Starlette:
    """Build the application. It needs no key, because its port must not be open to clients."""

    async def metrics(request: Request) -> Response:
        # With thousands of tenants, to collect and to write the metrics takes half a second.
        snapshot = services.metrics.registry.snapshot()
        content, content_type = await asyncio.to_thread(exposition, snapshot, request.headers.get("accept"))
        return Response(content, headers={"content-type": content_type})

    async def live(_request: Request) -> Response:
        return Response()

    async def ready(_request: Request) -> Response:
        return Response(status_code=200 if services.ready else 503)

    async def pods(_request: Request) -> Response:
        return JSONResponse({"pods": list(_pods(services))})

    routes = {"/metrics": metrics, "/live": live, "/ready": ready, "/pods": pods}
    return Starlette(routes=[Route(path, answer) for path, answer in routes.items()])


def _pods(services: Services) -> Iterator[dict[str, Any]]:
    for model, pool in services.catalog.pools:
        router = pool.fleet.router
        for role, pods in (("decode", router.decodes), ("prefill", router.prefills)):
            for pod in pods:
                yield {"model": model, "pool": pool.spec.name, "role": role, **_state(pod)}


def _state(pod: Pod) -> dict[str, Any]:
    return {
        "address": pod.address,
        "revision": pod.revision,
        "live": pod.live,
        "draining": pod.draining,
        "failures": pod.breaker.failures,
        "requests": pod.requests.load,
        "queued_prefill_tokens": pod.prefill_tokens.load,
        "blocks_held": pod.blocks_held,
        "blocks": pod.num_blocks,
        "prefill_tokens_per_s": round(pod.prefill_rate or pod.learned_rate),
        "dispatched": pod.dispatched,
        "cache_scopes": pod.cache_scopes,
    }
