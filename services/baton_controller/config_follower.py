"""Follows the configuration file while it changes."""

import logging
from pathlib import Path

from baton_controller.config_file import ConfigFile, ConfigFileError, read_config

log = logging.getLogger(__name__)


class ConfigFollower:
    """Reads the file again when it has changed. When the new content is invalid, the old configuration stays."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigFileError."""
        self._path = path
        self._raw: bytes | None = self._read()
        self.current: ConfigFile = read_config(path)

    def follow(self) -> None:
        raw = self._read()
        if raw == self._raw:
            return
        self._raw = raw
        try:
            self.current = read_config(self._path)
        except ConfigFileError as error:
            log.error("invalid configuration, the old one is kept: %s", error, extra={"event": "config_refused"})
        else:
            log.info("the configuration has changed", extra={"event": "config_read"})

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None
