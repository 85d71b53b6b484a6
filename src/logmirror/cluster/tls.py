"""The TLS side of `ConnectionSettings`: one context per client, errors in our words."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from logmirror.errors import LogmirrorError, UnavailableError, UsageError

if TYPE_CHECKING:
    from logmirror.cluster.properties import ConnectionSettings


def tls_context(settings: ConnectionSettings) -> ssl.SSLContext:
    """Load certificates and keys.

    Raises:
        UsageError: A file is missing or not what the property says.
    """
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    if settings.ssl_ca_location not in ("", "probe"):
        _load_ca_file(context, settings.ssl_ca_location)
    if settings.ssl_ca_pem:
        _load_ca_pem(context, settings.ssl_ca_pem)
    # The order matters: a context refuses CERT_NONE while it still checks names.
    context.check_hostname = settings.ssl_verify and settings.ssl_verify_hostname
    if not settings.ssl_verify:
        context.verify_mode = ssl.CERT_NONE
    if settings.ssl_cipher_suites:
        try:
            context.set_ciphers(settings.ssl_cipher_suites)
        except ssl.SSLError as error:
            raise UsageError("ssl.cipher.suites names no cipher that we have") from error
    if settings.ssl_certificate_location or settings.ssl_certificate_pem:
        _load_client_certificate(context, settings)
    return context


def _load_ca_file(context: ssl.SSLContext, location: str) -> None:
    path = Path(location)
    try:
        if path.is_dir():
            context.load_verify_locations(capath=location)
        else:
            context.load_verify_locations(cafile=location)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            "ssl.ca.location cannot be read as PEM certificates",
            hint="give a PEM file or a directory made by openssl rehash",
            path=location,
            reason=str(error),
        ) from error


def _load_ca_pem(context: ssl.SSLContext, pem: str) -> None:
    try:
        context.load_verify_locations(cadata=pem)
    except (ValueError, ssl.SSLError) as error:
        raise UsageError("ssl.ca.pem holds no PEM certificate") from error


def _load_client_certificate(context: ssl.SSLContext, settings: ConnectionSettings) -> None:
    # Python loads a key from a file only. Text given in a property goes through a file that only
    # this user can read and that is gone when loading is over.
    with tempfile.TemporaryDirectory(prefix="logmirror-tls-") as folder:

        def path_of(location: str, pem: str, name: str) -> str | None:
            if location or not pem:
                return location or None
            file = Path(folder) / name
            file.touch(mode=0o600)
            file.write_text(pem)
            return str(file)

        certificate = path_of(
            settings.ssl_certificate_location, settings.ssl_certificate_pem, "certificate.pem"
        )
        key = path_of(settings.ssl_key_location, settings.ssl_key_pem, "key.pem")
        try:
            # A callback instead of the text: without it OpenSSL would ask on the terminal.
            context.load_cert_chain(certificate or "", key, lambda: settings.ssl_key_password)
        except (OSError, ValueError, ssl.SSLError) as error:
            raise UsageError(
                "the client certificate and its key cannot be loaded",
                hint="both are PEM, the key belongs to the certificate, "
                "ssl.key.password opens the key",
                certificate=settings.ssl_certificate_location or "ssl.certificate.pem",
                reason=type(error).__name__,
            ) from error


def tls_error(error: Exception, *, host: str, port: int) -> LogmirrorError:
    """What a failed handshake says to the user."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UsageError(
            f"the certificate of the broker is not trusted: {error.verify_message}",
            hint="set ssl.ca.location to the authority that signed it",
            host=host,
            port=port,
        )
    if isinstance(error, ssl.SSLError) and not isinstance(
        error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    ):
        return UsageError(
            f"TLS could not be agreed on: {error.reason or error}",
            hint="check that the listener speaks TLS, its versions, and whether it wants a client "
            "certificate (ssl.certificate.location)",
            host=host,
            port=port,
        )
    return UnavailableError(
        "the connection was lost in the TLS handshake", host=host, port=port, reason=str(error)
    )
