"""The certificate with which the gateway speaks TLS by itself."""

import logging
import ssl
from pathlib import Path

from baton_common.file_state import file_state

log = logging.getLogger(__name__)


class Certificate:
    """A chain and its key in files that are replaced while the gateway runs, as cert-manager does."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises OSError, ssl.SSLError when the files are none or do not belong together."""
        self._chain = chain
        self._key = key
        self._loaded = file_state(chain, key)
        self.context = self._make_context()
        self.context.set_alpn_protocols(["http/1.1"])

    def follow(self) -> None:
        """Use for new connections what the files hold now; what cannot be used changes nothing."""
        try:
            state = file_state(self._chain, self._key)
            if state == self._loaded:
                return
            self._loaded = state
            self._make_context()  # a chain without its key would leave the one in use broken
            self.context.load_cert_chain(self._chain, self._key)
        except (OSError, ssl.SSLError) as error:
            log.error("the new certificate cannot be used: %s", error, extra={"event": "certificate_refused"})
        else:
            log.info("the certificate was replaced", extra={"event": "certificate_replaced"})

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._chain, self._key)
        return context
