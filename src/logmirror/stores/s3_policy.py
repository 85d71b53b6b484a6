"""Minimal IAM policies for the identities of S3 locations.

The writing identity creates objects and aborts uploads; the reading identity lists and gets. Delete
permissions are included only for `logmirror compact` and where old snapshots are pruned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.locations import S3Location

VERSION: Final = "2012-10-17"
"""Version of the policy language."""


def policies(
    locations: Iterable[S3Location],
    pruned: Iterable[tuple[S3Location, str]] = (),
    *,
    compacts: bool = False,
) -> dict[str, dict[str, object]]:
    """Return a policy for each role: `archiver`, or `writer` and `reader`.

    Identities with the same role share one policy, for all their locations.

    Args:
        locations: The locations of all destinations.
        pruned: Location and destination of chains whose old snapshots are deleted.
        compacts: The writing identity may also delete, for `logmirror compact`.
    """
    found: dict[str, list[dict[str, object]]] = {}
    folders = set(pruned)
    for location in dict.fromkeys(locations):
        writing = _writing(location, compacts=compacts)
        own = sorted(folder for where, folder in folders if where == location)
        writing += [_allow(["s3:DeleteObject"], f"{_below(location)}{f}/*") for f in own]
        if location.write == location.read:
            statements = found.setdefault("archiver", [])
            statements += [*writing, *_reading(location)]
        else:
            found.setdefault("writer", []).extend(writing)
            found.setdefault("reader", []).extend(_reading(location))
    return {
        role: {"Version": VERSION, "Statement": statements} for role, statements in found.items()
    }


def _writing(location: S3Location, *, compacts: bool) -> list[dict[str, object]]:
    actions = ["s3:PutObject", "s3:AbortMultipartUpload"]
    actions += ["s3:DeleteObject"] if compacts else []
    return [_allow(actions, _objects(location)), *_key(location, "kms:GenerateDataKey")]


def _reading(location: S3Location) -> list[dict[str, object]]:
    below = f"{location.prefix}/*" if location.prefix else "*"
    listing = _allow(["s3:ListBucket"], _bucket(location))
    if location.prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": below}}
    return [
        listing,
        _allow(["s3:ListBucketMultipartUploads"], _bucket(location)),
        _allow(["s3:GetObject"], _objects(location)),
        *_key(location, "kms:Decrypt"),
    ]


def _key(location: S3Location, action: str) -> list[dict[str, object]]:
    return [_allow([action], location.kms_key_id)] if location.kms_key_id else []


def _allow(actions: list[str], resource: str) -> dict[str, object]:
    return {"Effect": "Allow", "Action": actions, "Resource": resource}


def _bucket(location: S3Location) -> str:
    return f"arn:aws:s3:::{location.bucket}"


def _objects(location: S3Location) -> str:
    return f"{_below(location)}*"


def _below(location: S3Location) -> str:
    below = f"{location.prefix}/" if location.prefix else ""
    return f"{_bucket(location)}/{below}"
