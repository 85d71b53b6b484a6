"""Options of DataFrames select the archive and the part to read; invalid ones are errors.

Method: options as Spark passes them, compared with the values they mean; no Spark.
"""

import pytest

from logmirror.dataframes.options import PIECE_BYTES, Request
from logmirror.errors import UsageError
from logmirror.locations import FolderLocation, S3Location


def test_a_root_alone_asks_for_everything_in_a_folder():
    wanted = Request(location=FolderLocation("/archive"))
    for root in ("/archive", "file:///archive"):
        assert Request.of({"root": root}) == wanted
    assert Request.of({"path": "/archive"}) == wanted
    assert (wanted.first, wanted.end, wanted.partitions) == (0, None, None)
    assert (wanted.committed, wanted.verify, wanted.piece_bytes) == (True, True, PIECE_BYTES)


def test_every_option_has_its_meaning_however_it_is_written():
    found = Request.of(
        {
            "ROOT": "/archive",
            "name": "orders",
            "partitions": "0, 4-6,2",
            "starting-offset": "7",
            "endingOffset": "9",
            "topic": "t",
            "encoding": "UTF8",
            "isolation_level": "read_uncommitted",
            "verify": "false",
            "maxpartitionbytes": "5",
            "maxBytesPerTrigger": "6",
        }
    )
    assert found == Request(
        location=FolderLocation("/archive"),
        destination="orders",
        partitions=(0, 2, 4, 5, 6),
        first=7,
        end=9,
        topic="t",
        utf8=True,
        committed=False,
        verify=False,
        piece_bytes=5,
        trigger_bytes=6,
    )


def test_a_bucket_is_described_as_a_destination_describes_it():
    options = {
        "root": "s3a://lake/kafka/",
        "region": "r",
        "endpoint": "http://127.0.0.1:1",
        "accessKeyId": "id",
        "secretAccessKey": "hidden",
        "sessionToken": "hidden too",
        "roleArn": "role",
        "checksums": "when-required",
    }
    location = Request.of(options).location
    assert isinstance(location, S3Location)
    assert (location.bucket, location.prefix, location.region) == ("lake", "kafka", "r")
    assert location.path_style, "as for destinations: a store that is not Amazon's"
    assert location.checksums == "when_required"
    assert location.read == location.write
    assert (location.read.secret_access_key, location.read.role_arn) == ("hidden", "role")
    assert "hidden" not in repr(Request.of(options))
    assert not Request.of({"root": "s3://lake"}).location.path_style


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roott": "/archive"}, "there is no option 'roott'"),
        ({}, "must be the location"),
        ({"root": "archive"}, "must be the location"),
        ({"root": "/archive", "path": "/other"}, "`root` is set more than once"),
        ({"root": "/archive", "region": "x"}, "S3 options"),
        ({"root": "/archive", "partitions": "a-b"}, "numbers and ranges"),
        ({"root": "/archive", "partitions": "-1"}, "numbers and ranges"),
        ({"root": "/archive", "encoding": "latin"}, "must be one of"),
        ({"root": "/archive", "startingOffset": "-1"}, "whole number"),
        ({"root": "/archive", "verify": "maybe"}, "must be one of"),
        ({"root": "s3://"}, "no bucket"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Request.of(options)


def test_a_misspelt_option_gets_a_suggestion():
    with pytest.raises(UsageError) as caught:
        Request.of({"root": "/archive", "startingOfset": "1"})
    assert caught.value.hint == "did you mean `startingOffset`?"
