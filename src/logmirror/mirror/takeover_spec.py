"""Driver: which copy of another program a destination continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from logmirror.cluster.properties import ConnectionSettings


class Takeover(NamedTuple):
    """The copy of MirrorMaker 2 that a destination continues."""

    source: ConnectionSettings
    """The source cluster."""

    source_alias: str
    """Its name in MirrorMaker's configuration."""
