"""Settings of a connection that expose it to others in the network: permitted, and warned of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.cluster.properties import PropertyProblem

if TYPE_CHECKING:
    from logmirror.cluster.properties import ConnectionSettings


def exposures(settings: ConnectionSettings) -> list[PropertyProblem]:
    """Return what anyone between this machine and the brokers could read or pretend to be.

    SCRAM without TLS is not listed: it reveals no password. Neither is a connection without SASL
    and TLS, which has no secret.
    """
    found = []
    if settings.uses_tls and not settings.ssl_verify:
        what = "is false: any server can pose as a broker"
        advice = "set ssl.ca.location to the CA of the brokers, and verify"
        found.append(PropertyProblem("enable.ssl.certificate.verification", what, advice))
    elif settings.uses_tls and not settings.ssl_verify_hostname:
        what = "is none: any server with a certificate of a trusted CA can pose as a broker"
        advice = "use names that the certificates have, and https"
        found.append(PropertyProblem("ssl.endpoint.identification.algorithm", what, advice))
    if settings.security_protocol == "SASL_PLAINTEXT":
        sent = {"PLAIN": "the password", "OAUTHBEARER": "the token"}.get(settings.sasl_mechanism)
        if sent:
            what = f"is SASL_PLAINTEXT: {sent} is sent unencrypted"
            found.append(PropertyProblem("security.protocol", what, "use SASL_SSL"))
    return found
