"""Reads canaries from ConfigMaps, for a gateway in Kubernetes."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from baton_kube.canary_maps import (
    OVERRIDE_KEY,
    STATUS_KEY,
    VALUES_KEY,
    CanaryMapError,
    ControllerWeight,
    override_map,
    parse_override,
    parse_status,
    status_map,
    values_map,
)
from baton_kube.object_watch import Objects

from ..routing.canary import CanaryError, StatedCanary, effective, parse_stated
from .catalog import Catalog

log = logging.getLogger(__name__)


class CanaryWatches:
    """Combines the ConfigMaps of the chart, the controller and the operators.

    When one of them cannot be parsed, its last content stays in use.
    """

    def __init__(self, catalog: Catalog, prefix: str) -> None:
        self._catalog = catalog
        self._stated: Mapping[str, StatedCanary] = {}
        self._controller_weights: Mapping[str, ControllerWeight] = {}
        self._overrides: Mapping[str, int] = {}
        self.followed: dict[str, Callable[[Objects], None]] = {
            values_map(prefix): lambda maps: self._changed(self._read_values, _text(maps, VALUES_KEY)),
            status_map(prefix): lambda maps: self._changed(self._read_status, _text(maps, STATUS_KEY)),
            override_map(prefix): lambda maps: self._changed(self._read_override, _text(maps, OVERRIDE_KEY)),
        }

    def _read_values(self, text: str) -> None:
        self._stated = parse_stated(text or "{}")

    def _read_status(self, text: str) -> None:
        self._controller_weights = parse_status(text)

    def _read_override(self, text: str) -> None:
        self._overrides = parse_override(text)
        if unknown := self._overrides.keys() - {name for name, _ in self._catalog.pools}:
            extra = {"event": "canary_override_unknown"}
            log.warning("overrides name models that are not served: %s", ", ".join(sorted(unknown)), extra=extra)

    def _changed(self, read: Callable[[str], None], text: str) -> None:
        try:
            read(text)
        except (CanaryError, CanaryMapError) as error:
            log.error(
                "the new canaries are not used, the previous ones stay: %s", error, extra={"event": "canaries_refused"}
            )
            return
        canaries = effective(self._stated, self._controller_weights, self._overrides)
        self._catalog.set_canaries(canaries)
        shares: dict[str, Any] = {model: canary.weight for model, canary in canaries.items()}
        extra = {"event": "canaries_read", "canaries": shares, "overrides": dict(self._overrides)}
        log.info("canaries read", extra=extra)


def _text(maps: Objects, key: str) -> str:
    return next(((found.data or {}).get(key) for found in maps.values()), None) or ""
