"""Runs the gateway."""

import gc
import logging
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from baton_common.logging import configure_logging
from baton_common.peer_tls import PeerTlsError
from baton_common.peer_token import PeerTokenError
from baton_gateway.app import create_app
from baton_gateway.canary import CanaryError
from baton_gateway.catalog import load_catalog
from baton_gateway.certificate import Certificate
from baton_gateway.crash_log import CrashFormatter
from baton_gateway.gateway import Gateway
from baton_gateway.model import ModelError
from baton_gateway.models_file import ModelsFileError
from baton_gateway.server import GatewayServer, ServerConfig, listen
from baton_gateway.settings import GatewaySettings
from baton_gateway.tenants import TenantsError
from baton_kube.errors import KubernetesError

if TYPE_CHECKING:
    from baton_common.tracing import Tracing
    from baton_gateway.genai_metrics import GenAiMetrics

log = logging.getLogger(__name__)


def main(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Exits with status 1 and one log line when it cannot start."""
    configure_logging("gateway", settings.log_level, CrashFormatter)
    # Its lines at this level repeat ours.
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
        except OSError as error:  # ssl's errors are, too
            _fail(f"cannot use {settings.tls_cert_file} with {settings.tls_key_file}: {error}")
    # What is here now stays: nothing of it needs to be looked at for garbage, which would hold up streams.
    gc.collect()
    gc.freeze()
    ports = {"port": server_socket.getsockname()[1], "admin_port": admin_socket.getsockname()[1]}
    log.info("listening", extra={"event": "listening", **ports})
    config = ServerConfig(gateway, create_app(gateway), certificate)
    GatewayServer(gateway, config, admin_socket).run([server_socket])


def _telemetry(settings: GatewaySettings) -> "tuple[Tracing, GenAiMetrics] | tuple[()]":
    if not settings.otlp_endpoint:
        return ()
    # Only here, as OpenTelemetry takes a moment and some memory.
    from baton_common.tracing import Tracing
    from baton_gateway.genai_metrics import GenAiMetrics

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
