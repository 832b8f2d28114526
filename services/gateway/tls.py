"""TLS of the gateway: a certificate and its key, taken anew when the files are renewed."""

import ssl

from services.settings import ConfigError


class ServerTls:
    """`context` is what the server uses; `read` the files before it does."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = certificate, key
        self.context = _new_context()

    def read(self) -> None:
        """Connections that begin from now on get this certificate. Raises ConfigError, and then all stays as it was."""
        for context in (_new_context(), self.context):
            self._load(context)

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        try:
            context.load_cert_chain(certificate, key, password="")  # an encrypted key would ask at the terminal
        except ssl.SSLError as error:
            why = error.reason or error
            raise ConfigError(
                f"tls_certificate {certificate} and tls_key {key} are no certificate chain and its unencrypted key, "
                f"both in PEM: {why}"
            ) from None
        except OSError as error:
            raise ConfigError(f"tls_certificate {certificate} or tls_key {key}: {error.strerror}") from None


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
