"""Minimal IAM policies for the identities of S3 locations, and policies of buckets.

The writing identity creates objects and aborts uploads; the reading identity lists and gets. Delete
permissions are included only for `logmirror compact` and where old snapshots are pruned.

A policy of a bucket makes Amazon S3 itself refuse every write that could replace an object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.locations import S3Location

VERSION: Final = "2012-10-17"
"""Version of the policy language."""


def policies(
    written: Iterable[tuple[S3Location, str]],
    pruned: Iterable[tuple[S3Location, str]] = (),
    *,
    compacts: bool = False,
) -> dict[str, dict[str, object]]:
    """Return a policy for each role: `archiver`, or `writer` and `reader`.

    Identities with the same role share one policy, for all their locations.

    Args:
        written: Location and name of each destination. Uploads are aborted in these only.
        pruned: Location and folder of snapshots of which old ones are deleted.
        compacts: The writing identity may also delete, for `logmirror compact`.
    """
    found: dict[str, list[dict[str, object]]] = {}
    deleted = set(pruned)
    for location, names in _by_location(written).items():
        writing = _writing(location, compacts=compacts)
        writing += [_allow(["s3:AbortMultipartUpload"], _below(location, name)) for name in names]
        own = sorted(folder for where, folder in deleted if where == location)
        writing += [_allow(["s3:DeleteObject"], _below(location, folder)) for folder in own]
        if location.write == location.read:
            statements = found.setdefault("archiver", [])
            statements += [*writing, *_reading(location)]
        else:
            found.setdefault("writer", []).extend(writing)
            found.setdefault("reader", []).extend(_reading(location))
    return {
        role: {"Version": VERSION, "Statement": statements} for role, statements in found.items()
    }


def create_only_policies(
    written: Iterable[tuple[S3Location, str]],
) -> dict[str, dict[str, object]]:
    """Return a policy for each bucket, which denies writes without `If-None-Match`.

    The requests that begin an upload and send its parts have no such header. Amazon exempts them by
    a condition of its own; the request that completes the upload has the header.

    Args:
        written: Location and name of each destination. Keys of other programs are not affected.
    """
    found: dict[str, list[dict[str, object]]] = {}
    for location, names in _by_location(written).items():
        statement: dict[str, object] = {
            "Effect": "Deny",
            "Principal": "*",
            "Action": ["s3:PutObject"],
            "Resource": [_below(location, name) for name in (*names, ".logmirror")],
            "Condition": {
                "Null": {"s3:if-none-match": "true"},
                "Bool": {"s3:ObjectCreationOperation": "true"},
            },
        }
        found.setdefault(location.bucket, []).append(statement)
    return {
        bucket: {"Version": VERSION, "Statement": statements}
        for bucket, statements in found.items()
    }


def _by_location(written: Iterable[tuple[S3Location, str]]) -> dict[S3Location, list[str]]:
    """Return the names of the destinations at each location, sorted."""
    found: dict[S3Location, set[str]] = {}
    for location, name in written:
        found.setdefault(location, set()).add(name)
    return {location: sorted(names) for location, names in found.items()}


def _writing(location: S3Location, *, compacts: bool) -> list[dict[str, object]]:
    actions = ["s3:PutObject", *(["s3:DeleteObject"] if compacts else [])]
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
    below = f"{location.prefix}/" if location.prefix else ""
    return f"{_bucket(location)}/{below}*"


def _below(location: S3Location, folder: str) -> str:
    return f"{_objects(location)[:-1]}{folder}/*"
