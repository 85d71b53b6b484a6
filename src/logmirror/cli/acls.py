"""`logmirror acls print`: the Kafka ACLs that a configuration needs."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

import logmirror
from logmirror.cli.options import ConfigOption

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror import Acl, ClusterAcls

_HEAD: Final = """\
# What each principal must be allowed, as commands of Kafka's own tool. If the cluster requires
# authentication, add --command-config with the properties of an administrator.
"""


def acls_print(
    config: ConfigOption,
    *,
    principal: Annotated[
        str | None,
        typer.Option(
            help="The principal, such as User:mirror. Default: the users in the configuration.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Literal["text", "json"], typer.Option("--format", help="Output format.")
    ] = "text",
) -> None:
    """Print the Kafka ACLs that a configuration needs, as commands of kafka-acls.sh.

    Connects to nothing.
    """
    settings = logmirror.load(config, needs_variables=False)
    clusters = logmirror.kafka_acls(settings, principal=principal)
    if output == "json":
        typer.echo(json.dumps(acls_json(clusters), indent=2))
    else:
        typer.echo(acls_text(clusters), nl=False)


def acls_text(clusters: Iterable[ClusterAcls]) -> str:
    """Return commands of `kafka-acls.sh` with their purpose; optional ones are comments."""
    return "\n".join([_HEAD, *(_cluster_text(cluster) for cluster in clusters)])


def _cluster_text(cluster: ClusterAcls) -> str:
    lines = [f"# -- {cluster.principal} at {cluster.bootstrap_servers}"]
    for is_optional in (False, True):
        chosen = [acl for acl in cluster.acls if acl.is_optional is is_optional]
        if chosen and is_optional:
            lines.append("# Optional. The lines above each command say what is lost without it.")
        for resource in dict.fromkeys((a.resource, a.name, a.is_prefix) for a in chosen):
            of_it = [acl for acl in chosen if (acl.resource, acl.name, acl.is_prefix) == resource]
            lines += [f"#   {acl.operation}: {acl.purpose}" for acl in of_it]
            command = _command(cluster, of_it)
            lines += [f"# {line}" if is_optional else line for line in command]
    return "\n".join(lines) + "\n"


def _command(cluster: ClusterAcls, acls: list[Acl]) -> list[str]:
    first = acls[0]
    words = ["--cluster"] if first.resource == "cluster" else [f"--{first.resource}", first.name]
    words += ["--resource-pattern-type", "prefixed"] if first.is_prefix else []
    for acl in acls:
        words += ["--operation", acl.operation]
    servers = ["kafka-acls.sh", "--bootstrap-server", cluster.bootstrap_servers, "--add"]
    return [
        f"{shlex.join([*servers, '--allow-principal', cluster.principal])} \\",
        f"  {shlex.join(words)}",
    ]


def acls_json(clusters: Iterable[ClusterAcls]) -> list[dict[str, object]]:
    """Return the same as JSON."""
    return [
        {
            "bootstrap_servers": cluster.bootstrap_servers,
            "principal": cluster.principal,
            "acls": [
                {
                    "resource_type": acl.resource,
                    "name": acl.name,
                    "pattern_type": "prefixed" if acl.is_prefix else "literal",
                    "operation": acl.operation,
                    "optional": acl.is_optional,
                    "purpose": acl.purpose,
                }
                for acl in cluster.acls
            ],
        }
        for cluster in clusters
    ]
