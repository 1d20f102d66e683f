"""The certificate for TLS connections that end at the gateway itself."""

import logging
import ssl
from pathlib import Path

from baton_common.file_state import file_state

log = logging.getLogger(__name__)


class Certificate:
    """A certificate chain and its key, in files that cert-manager or others may replace while the gateway runs."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises OSError or ssl.SSLError when the files cannot be read or do not belong together."""
        self._chain = chain
        self._key = key
        self._loaded = file_state(chain, key)
        self.context = self._make_context()
        self.context.set_alpn_protocols(["http/1.1"])

    def follow(self) -> None:
        """Use the current files for new connections. If they cannot be used, the previous certificate stays."""
        try:
            state = file_state(self._chain, self._key)
            if state == self._loaded:
                return
            self._loaded = state
            self._make_context()  # tried first: a chain without its key would break the context that is in use
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
