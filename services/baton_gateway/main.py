"""Runs the gateway."""

import gc
import logging
import socket
import sys
from typing import NoReturn

import jinja2
from prometheus_client import start_http_server

from baton_common.logging import configure_logging
from baton_gateway.app import create_app
from baton_gateway.certificate import Certificate
from baton_gateway.gateway import Gateway
from baton_gateway.model import load_model
from baton_gateway.server import GatewayServer, ServerConfig, listen
from baton_gateway.settings import GatewaySettings
from baton_gateway.tenants import TenantsError

log = logging.getLogger(__name__)


def main(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Exits with status 1 and one log line when it cannot start."""
    configure_logging("gateway", settings.log_level)
    # Its lines at this level repeat ours.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server_socket = _listen(settings)
    try:
        gateway = Gateway(settings, load_model(settings))
    except TenantsError as error:
        _fail(f"cannot use the tenants: {error}")
    except (OSError, ValueError, jinja2.TemplateError) as error:
        _fail(f"cannot load the model from {settings.model}: {error}")
    except Exception as error:  # the tokenizers library raises nothing narrower
        _fail(f"cannot load the tokenizer from {settings.model}: {error}")
    if settings.metrics_port:
        try:
            start_http_server(settings.metrics_port, settings.host, gateway.metrics.registry)
        except OSError as error:
            _fail(f"cannot listen on metrics port {settings.metrics_port}: {error.strerror}")
    certificate = None
    if settings.tls_cert_file is not None and settings.tls_key_file is not None:
        try:
            certificate = Certificate(settings.tls_cert_file, settings.tls_key_file)
        except OSError as error:  # ssl's errors are, too
            _fail(f"cannot use {settings.tls_cert_file} with {settings.tls_key_file}: {error}")
    # What is here now stays: nothing of it needs to be looked at for garbage, which would hold up streams.
    gc.collect()
    gc.freeze()
    log.info("listening", extra={"event": "listening", "port": server_socket.getsockname()[1]})
    GatewayServer(gateway, ServerConfig(gateway, create_app(gateway), certificate)).run([server_socket])


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        return listen(settings.host, settings.port)
    except OSError as error:
        _fail(f"cannot listen on port {settings.port} of {settings.host}: {error.strerror}")


def _fail(reason: str) -> NoReturn:
    log.error(reason)
    sys.exit(1)
