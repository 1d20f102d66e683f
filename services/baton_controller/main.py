"""Runs the controller."""

import asyncio
import logging
import signal
import socket
import sys
from typing import NoReturn

from kubernetes import client

from baton_common.logging import configure_logging
from baton_controller.admin import AdminServer
from baton_controller.canary_map import CanaryMap
from baton_controller.canary_reconciler import CanaryReconciler
from baton_controller.config_file import ConfigFileError
from baton_controller.config_follower import ConfigFollower
from baton_controller.controller import Controller
from baton_controller.events import Events
from baton_controller.gateways import Gateways
from baton_controller.metrics import Metrics
from baton_controller.scaler import Scaler
from baton_controller.settings import ControllerSettings
from baton_kube.api import connect, own_namespace
from baton_kube.canary_maps import status_map
from baton_kube.errors import KubernetesError

log = logging.getLogger(__name__)


def main(settings: ControllerSettings) -> None:
    """Run until SIGTERM or SIGINT. Exits with status 1 and one log line when the controller cannot start."""
    configure_logging("controller", settings.log_level)
    try:
        config = ConfigFollower(settings.config_file)
        api = connect()
    except (ConfigFileError, KubernetesError) as error:
        _fail(str(error))
    asyncio.run(_run(settings, config, api))


async def _run(settings: ControllerSettings, config: ConfigFollower, api: client.ApiClient) -> None:
    metrics = Metrics()
    controller = build(settings, config, api, metrics)
    try:
        admin = AdminServer(
            settings.admin_host,
            settings.admin_port,
            metrics.registry,
            live=lambda: controller.live,
            ready=lambda: controller.ready,
        )
    except OSError as error:
        _fail(f"cannot listen on port {settings.admin_port} of {settings.admin_host}: {error.strerror}")
    admin.start()
    log.info("listening", extra={"event": "listening", "admin_port": admin.port})
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, controller.stop)
    await controller.run()
    admin.stop()


def build(settings: ControllerSettings, config: ConfigFollower, api: client.ApiClient, metrics: Metrics) -> Controller:
    """Return a controller for the release that the settings name."""
    namespace = settings.namespace or own_namespace()
    canary_map = CanaryMap(api, namespace, settings.canary_configmaps, settings.owner)
    events = Events(api, namespace, status_map(settings.canary_configmaps), socket.gethostname())
    return Controller(
        config,
        Gateways(api, namespace, settings.release),
        CanaryReconciler(canary_map, events, metrics),
        Scaler(api, namespace, metrics),
        metrics,
        settings.interval_s,
    )


def _fail(reason: str) -> NoReturn:
    log.error(reason)
    sys.exit(1)
