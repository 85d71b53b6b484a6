"""TLS for `ConnectionSettings`: one context per client, with logmirror's errors."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from logmirror.cluster.properties import pem
from logmirror.errors import LogmirrorError, UnavailableError, UsageError

if TYPE_CHECKING:
    from logmirror.cluster.properties import ConnectionSettings


def tls_context(settings: ConnectionSettings) -> ssl.SSLContext:
    """Load certificates and keys.

    Raises:
        UsageError: A file is missing or has the wrong content.
    """
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    load_authorities(context, settings.ssl_ca_location, settings.ssl_ca_pem, prefix="ssl")
    # The order matters: a context refuses CERT_NONE while it still checks names.
    context.check_hostname = settings.ssl_verify and settings.ssl_verify_hostname
    if not settings.ssl_verify:
        context.verify_mode = ssl.CERT_NONE
    if settings.ssl_cipher_suites:
        try:
            context.set_ciphers(settings.ssl_cipher_suites)
        except ssl.SSLError as error:
            raise UsageError("ssl.cipher.suites has no supported cipher") from error
    if settings.ssl_certificate_location or settings.ssl_certificate_pem:
        _load_client_certificate(context, settings)
    return context


def load_authorities(context: ssl.SSLContext, location: str, pem: str, *, prefix: str) -> None:
    """Trust the CA certificates of the properties `PREFIX.ca.location` and `PREFIX.ca.pem`.

    Args:
        context: Trusts them in addition.
        location: A file or directory. Empty or `probe`: none.
        pem: Certificates as text. Empty: none.
        prefix: `ssl` or `https`.

    Raises:
        UsageError: A file is missing or has the wrong content.
    """
    if location not in ("", "probe"):
        _load_ca_file(context, location, f"{prefix}.ca.location")
    if pem:
        try:
            context.load_verify_locations(cadata=pem)
        except (ValueError, ssl.SSLError) as error:
            raise UsageError(f"{prefix}.ca.pem has no PEM certificate") from error


def _load_ca_file(context: ssl.SSLContext, location: str, name: str) -> None:
    path = Path(location)
    try:
        if path.is_dir():
            context.load_verify_locations(capath=location)
        else:
            context.load_verify_locations(cafile=location)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"{name} cannot be read as PEM certificates",
            hint="give a PEM file or a directory made by openssl rehash",
            path=location,
            reason=str(error),
        ) from error


def _load_client_certificate(context: ssl.SSLContext, settings: ConnectionSettings) -> None:
    # Python loads a key only from a file. Text from a property goes through a temporary file that
    # only this user can read.
    with tempfile.TemporaryDirectory(prefix="logmirror-tls-") as folder:

        def path_of(location: str, text: str, name: str) -> str | None:
            if location or not text:
                return location or None
            file = Path(folder) / name
            file.touch(mode=0o600)
            file.write_text(text)
            return str(file)

        certificate = path_of(
            settings.ssl_certificate_location, settings.ssl_certificate_pem, "certificate.pem"
        )
        key = path_of(settings.ssl_key_location, pem(settings.ssl_key_pem), "key.pem")
        try:
            # A callback, because OpenSSL would otherwise prompt on the terminal.
            context.load_cert_chain(certificate or "", key, lambda: settings.ssl_key_password)
        except (OSError, ValueError, ssl.SSLError) as error:
            raise UsageError(
                "the client certificate and its key cannot be loaded",
                hint="both must be PEM, the key must belong to the certificate, and "
                "ssl.key.password must decrypt the key",
                certificate=settings.ssl_certificate_location or "ssl.certificate.pem",
                reason=type(error).__name__,
            ) from error


def tls_error(error: Exception, *, host: str, port: int) -> LogmirrorError:
    """The error for a failed handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UsageError(
            f"the certificate of the broker is not trusted: {error.verify_message}",
            hint="set ssl.ca.location to the CA that signed it",
            host=host,
            port=port,
        )
    if isinstance(error, ssl.SSLError) and not isinstance(
        error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    ):
        return UsageError(
            f"TLS handshake failed: {error.reason or error}",
            hint="check that the listener speaks TLS, its versions, and whether it requires a "
            "client certificate (ssl.certificate.location)",
            host=host,
            port=port,
        )
    return UnavailableError(
        "the connection was lost during the TLS handshake", host=host, port=port, reason=str(error)
    )
