"""Runs the gateway."""

import gc
import logging
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from baton_common.logging import configure_logging
from baton_common.peer_tls import PeerTlsError
from baton_common.peer_token import PeerTokenError
from baton_kube.errors import KubernetesError

from .concurrency.crash_log import CrashFormatter
from .fleet.catalog import load_catalog
from .gateway import Gateway
from .models.model import ModelError
from .models.models_file import ModelsFileError
from .routing.canary import CanaryError
from .settings import GatewaySettings
from .tenancy.tenants import TenantsError
from .web.app import create_app
from .web.certificate import Certificate
from .web.connections import raise_file_limit
from .web.server import GatewayServer, ServerConfig, listen

if TYPE_CHECKING:
    from baton_common.tracing import Tracing

    from .telemetry.genai_metrics import GenAiMetrics

log = logging.getLogger(__name__)


def main(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Exits with status 1 and one log line when it cannot start."""
    configure_logging("gateway", settings.log_level, CrashFormatter)
    # Below this level, uvicorn's messages repeat those of the gateway.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server_socket = _listen(settings.host, settings.port)
    admin_socket = _listen(settings.admin_host or settings.host, settings.admin_port)
    try:
        gateway = Gateway(settings, load_catalog(settings), *_telemetry(settings))
    except TenantsError as error:
        _fail(f"cannot use the tenants: {error}")
    except (ModelError, ModelsFileError, CanaryError, KubernetesError, PeerTlsError, PeerTokenError) as error:
        _fail(str(error))
    certificate = None
    if settings.tls_cert_file is not None and settings.tls_key_file is not None:
        try:
            certificate = Certificate(settings.tls_cert_file, settings.tls_key_file)
        except OSError as error:  # ssl.SSLError is an OSError
            _fail(f"cannot use {settings.tls_cert_file} with {settings.tls_key_file}: {error}")
    # The objects that exist by now live as long as the process. Garbage collections that scan them would delay streams.
    gc.collect()
    gc.freeze()
    ports = {"port": server_socket.getsockname()[1], "admin_port": admin_socket.getsockname()[1]}
    log.info("listening", extra={"event": "listening", **ports})
    raise_file_limit()
    services = gateway.services
    config = ServerConfig(services, create_app(services, gateway.running), certificate)
    GatewayServer(services, config, admin_socket).run([server_socket])


def _telemetry(settings: GatewaySettings) -> "tuple[Tracing, GenAiMetrics] | tuple[()]":
    if not settings.otlp_endpoint:
        return ()
    # Imported only when it is needed, because OpenTelemetry takes time to import and memory.
    from baton_common.tracing import Tracing

    from .telemetry.genai_metrics import GenAiMetrics

    tracing = Tracing("gateway", settings.otlp_endpoint, settings.trace_share, {})
    return tracing, GenAiMetrics(settings.otlp_endpoint)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        _fail(f"cannot listen on port {port} of {host}: {error.strerror}")


def _fail(reason: str) -> NoReturn:
    log.error(reason)
    sys.exit(1)
