"""Secrets that executors resolve: which settings they are, and what they refer to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logmirror.config import values
from logmirror.config.s3_rules import identities
from logmirror.references import Reference, Secret

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.config.source import Source

SECRET_PROPERTIES: Final = (
    *("sasl.password", "sasl.oauthbearer.client.secret", "sasl.oauthbearer.config"),
    *("ssl.key.password", "ssl.key.pem"),
)
"""Connection properties that hold secrets. Where executors resolve secrets, each is a reference."""

REFERABLE: Final = (
    *SECRET_PROPERTIES,
    *("sasl.oauthbearer.extensions", "sasl.oauthbearer.token.endpoint.url"),
)
"""Connection properties that executors resolve if they are references: the two may hold secrets."""

_SECRET_KEYS: Final = ("secret-access-key", "session-token")


def check_secrets(source: Source, root: dict[str, Any]) -> None:
    """Report each secret that is not one reference, where executors resolve them."""
    if values.text(values.mapping(root, "spark") or {}, "secrets") != "executors":
        return
    for path in _secrets(root):
        if path not in source.references:
            message = "must be a single reference with spark.secrets: executors"
            suggestion = "write ${NAME} or ${file:PATH}, without a default or other text"
            source.add_problem(path, message, suggestion)


def _secrets(root: dict[str, Any]) -> Iterator[str]:
    """Yield the paths of all secrets."""
    places = [("destination", values.mapping(root, "destination") or {})]
    for path, mirror in values.items(root, "mirrors", ""):
        places.append((f"{path}.source", values.mapping(mirror, "source") or {}))
        places += values.items(mirror, "destinations", path)
    for path, place in places:
        for name, value in (values.mapping(place, "properties") or {}).items():
            if name in SECRET_PROPERTIES and value is not None:
                yield f"{path}.properties.{name}"
        for where, identity in identities(place, path):
            yield from (f"{where}.{key}" for key in _SECRET_KEYS if identity.get(key) is not None)


def secret(text: str, path: str, references: Mapping[str, Reference]) -> str:
    """Return a text with the reference from which it was read, if there is one.

    Args:
        text: The value.
        path: Its path, such as `mirrors[0].source.properties.sasl.password`.
        references: References by path.
    """
    return Secret(text, references[path]) if path in references else text


def with_secrets(
    properties: Mapping[str, str], path: str, references: Mapping[str, Reference]
) -> dict[str, str]:
    """Return the connection properties at `path` with the references of their secrets."""
    found = {name: properties[name] for name in properties if name in REFERABLE}
    secrets = {name: secret(text, f"{path}.{name}", references) for name, text in found.items()}
    return {**properties, **secrets}
