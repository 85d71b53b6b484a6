"""An S3 store with faults of the network, the server, or a second writer.

Method: a real server behind a proxy that spoils one request of a kind: it loses the response to a
completed request, truncates a body, or returns an error itself. The result is read from the
server's own files.
"""

import contextlib
import functools
import hashlib
import logging
import threading
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kit.fakes.s3_proxy import Fault
from kit.fakes.scripted import SteppingClock
from logmirror.archive.naming import is_object_of
from logmirror.broker.bucket.heartbeats import Heartbeat, newest
from logmirror.errors import CorruptionError, OutcomeUnknownError, UnavailableError, UsageError
from logmirror.locations import S3Identity, S3Location
from logmirror.stores import s3, s3_calls, s3_leftovers
from logmirror.stores.base import AlreadyExistsError, Tail
from logmirror.stores.opening import Leftovers, begin_writing
from logmirror.stores.s3 import S3Store

pytestmark = pytest.mark.xdist_group("s3")


def staged(store, data, *, travels, name="f/a"):
    staged_object = store.stage("an object")
    staged_object.write(data)
    return staged_object.finish(name, travels=travels)


# Where a listing ends


class _Listed:
    """Returns listings of these names, and counts the requests."""

    def __init__(self, names):
        self.names, self.count = sorted(names), 0

    def read(self, operation, **arguments):
        assert operation == "list_objects_v2"
        self.count += 1
        prefix, after = arguments["Prefix"], arguments.get("StartAfter", "")
        found = [f"{prefix}{name}" for name in self.names if f"{prefix}{name}" > after]
        page = found[: arguments["MaxKeys"]]
        contents = [{"Key": key, "Size": 1} for key in page]
        return {"Contents": contents, "IsTruncated": len(found) > len(page)}


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(0, 2**40))
@pytest.mark.mirror_v3("S3-11")
def test_the_tail_of_very_many_names_takes_few_requests(steps, start):
    names, at = [], start
    for number in range(4000):
        names.append(f"{at:020d}-{at + steps[number % len(steps)] - 1:020d}.parquet")
        at += steps[number % len(steps)]
    listed = _Listed(names)

    found = S3Store(S3Location(bucket="bucket"), calls=listed).tail("f")

    assert not found.is_whole
    assert found.names == names[-len(found.names) :]
    assert listed.count <= 45


@given(st.integers(1001, 5000), st.integers(0, 5000), st.integers(0, 3))
@example(1001, 0, 1)
@example(2001, 17, 0)
def test_names_that_are_no_numbers_do_not_hide_the_last_numbers(count, start, others):
    names = [f"{number:020d}" for number in range(start, start + count)]
    foreign = ["README", "README.1", "notes"][:others]
    listed = _Listed([*names, *foreign])

    found = S3Store(S3Location(bucket="bucket"), calls=listed).tail("f")

    assert found.names == [*names, *foreign][-len(found.names) :]
    assert len(found.names) > others
    assert listed.count <= 45


def test_the_newest_of_very_many_heartbeats_is_found():
    """Their names begin with the epoch, which those of one owner share."""
    beats = [Heartbeat(1, 7, 9), *(Heartbeat(2, number) for number in range(1, 2502))]
    names = [beat.name for beat in beats]
    assert newest(S3Store(S3Location(bucket="bucket"), calls=_Listed(names))) == beats[-1]


@pytest.mark.mirror_v3("S3-20")
def test_a_key_that_only_draws_a_folder_is_passed_over(s3_server, bucket, store):
    client = s3_server.client()
    store.create("f/a", b"1")
    for key in ("p/", "p/f/", "p/f/drawn/"):
        client.put_object(Bucket=bucket, Key=key)
    assert list(store.names("f")) == store.tail("f").names == ["a"]
    assert store.sizes("f") == {"a": 1}
    client.put_object(Bucket=bucket, Key="p/f/drawn/b", Body=b"2")
    with pytest.raises(CorruptionError, match="something other than objects"):
        list(store.names("f"))


def test_the_tail_of_a_real_listing_is_its_end(s3_server, bucket):
    folder = s3_server.files(bucket) / "f"
    folder.mkdir()
    names = [f"{number * 1000:020d}-{number * 1000 + 999:020d}.parquet" for number in range(2500)]
    for name in names:
        (folder / name).touch()

    found = S3Store(s3_server.location(bucket)).tail("f")

    assert found == Tail(names[-len(found.names) :], is_whole=False)


# Lost responses, transient errors


LOST = ["lose-response", "cut-response"]
PASSING = ["500", "503", "429", "409", "409-folder", "reset"]


@pytest.mark.parametrize("fault", [*LOST, *PASSING])
def test_a_create_is_done_once_whatever_happens_to_the_first_attempt(
    s3_server, bucket, proxy, store, fault
):
    proxy.spoil(Fault(fault, method="PUT"))

    store.create("f/a", b"content")

    assert (s3_server.files(bucket) / "p/f/a").read_bytes() == b"content"
    assert proxy.spoiled == 1


@pytest.mark.parametrize("fault", LOST)
def test_a_name_taken_by_another_writer_after_a_lost_response_is_a_conflict(
    s3_server, bucket, proxy, store, fault
):
    (s3_server.client()).put_object(Bucket=bucket, Key="p/f/a", Body=b"another's")
    proxy.spoil(Fault(fault, method="PUT"))

    with pytest.raises(AlreadyExistsError):
        store.create("f/a", b"content")

    assert store.read("f/a") == b"another's"


@pytest.mark.parametrize("fault", [*LOST, *PASSING])
@pytest.mark.parametrize("travels", [False, True])
def test_an_object_is_published_once_whatever_happens_to_the_first_attempt(
    proxy, store, fault, travels
):
    data = bytes(range(256)) * 100
    token = staged(store, data, travels=travels)
    proxy.spoil(Fault(fault, method="POST" if travels else "PUT"))

    store.publish(token, "f/a")

    assert store.read("f/a") == data
    assert proxy.spoiled == 1
    assert list(store.names("f")) == ["a"]


@pytest.mark.parametrize("fault", [*LOST, *PASSING, "cut-body"])
def test_a_part_is_uploaded_whatever_happens_to_the_first_attempt(
    s3_server, bucket, proxy, store, fault
):
    proxy.spoil(Fault(fault, method="PUT"))

    token = staged(store, b"part" * 1000, travels=True)
    store.publish(token, "f/a")

    assert (s3_server.files(bucket) / "p/f/a").read_bytes() == b"part" * 1000
    assert proxy.spoiled == 1


@pytest.mark.parametrize("fault", [*LOST, *PASSING])
def test_a_listing_and_a_read_are_asked_again(proxy, store, fault):
    store.create("f/a", b"content")
    proxy.spoil(Fault(fault, method="GET"))
    assert list(store.names("f")) == ["a"]
    proxy.spoil(Fault(fault, method="GET"))
    assert store.read("f/a") == b"content"
    assert proxy.spoiled == 2


def test_a_response_that_never_comes_is_unknown_and_nothing_is_done_twice(
    s3_server, bucket, proxy, store, monkeypatch
):
    monkeypatch.setattr(s3_calls, "DEADLINE_MS", 300)
    proxy.spoil(Fault("lose-response", method="PUT", times=1000))

    with pytest.raises(OutcomeUnknownError):
        store.create("f/a", b"content")

    assert S3Store(s3_server.location(bucket, "p")).read("f/a") == b"content"


def test_a_store_that_is_not_there_is_unavailable(s3_server, bucket, monkeypatch):
    monkeypatch.setattr(s3_calls, "DEADLINE_MS", 300)
    store = S3Store(s3_server.location(bucket, endpoint="http://127.0.0.1:9"))
    with pytest.raises(UnavailableError):
        store.create("f/a", b"content")


# What people have to put right


def test_a_bucket_that_does_not_exist_is_the_users_to_put_right(s3_server):
    store = S3Store(s3_server.location("no-such-bucket-here"))
    with pytest.raises(UsageError) as caught:
        list(store.names("f"))
    assert caught.value.facts["code"] == "NoSuchBucket"


@pytest.mark.parametrize("what", ["key", "secret"])
def test_wrong_credentials_are_the_users_to_put_right(s3_server, bucket, what):
    key = "nobody" if what == "key" else s3_server.access_key
    wrong = S3Identity(access_key_id=key, secret_access_key="wrong" * 8)
    location = S3Location(
        bucket=bucket,
        endpoint=s3_server.endpoint,
        region="us-east-1",
        path_style=True,
        read=wrong,
        write=wrong,
    )
    with pytest.raises(UsageError) as caught:
        S3Store(location).create("f/a", b"x")
    assert "wrong" not in str(caught.value)


# Many at once, large ones, leftovers


def test_of_many_who_create_one_name_at_once_one_succeeds(s3_server, bucket):
    results = []

    def create(number):
        store = S3Store(s3_server.location(bucket))
        try:
            store.create("f/a", b"%d" % number * 1000)
            results.append(number)
        except AlreadyExistsError:
            pass

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (winner,) = results
    assert S3Store(s3_server.location(bucket)).read("f/a") == b"%d" % winner * 1000


def test_a_large_object_is_uploaded_in_parts_and_read_back(s3_server, bucket, monkeypatch):
    monkeypatch.setattr(s3, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    store = S3Store(s3_server.location(bucket))
    block = hashlib.sha256(b"seed").digest() * 4096
    staged_object = store.stage("large")
    for number in range(100):
        staged_object.write(b"%08d" % number + block)

    store.publish(staged_object.finish("f/a", travels=False), "f/a")

    with store.open("f/a") as file:
        for number in range(100):
            assert file.read(8) == b"%08d" % number
            assert file.read(len(block)) == block
        assert file.read(1) == b""


def own(folder):
    """What a mirror with this one destination passes to `sweep`."""
    return [folder], functools.partial(is_object_of, [folder])


OWN = f"orders/0/{0:020d}-{99:020d}.batches"
FOREIGN = [
    "payroll/2026/backup.tar",
    f"payroll/0/{0:020d}-{99:020d}.batches",  # of another mirror's destination
    "orders/report.csv",
    "orders/0/report.parquet",
    f"orders/0/{0:020d}-{99:020d}.csv",
    f"orders/00/{0:020d}-{99:020d}.batches",
    f"orders/0/extra/{0:020d}-{99:020d}.batches",
]


@pytest.mark.parametrize("prefix", ["", "shared"])
def test_a_start_aborts_its_own_old_uploads_and_none_of_others(
    s3_server, bucket, prefix, monkeypatch, caplog
):
    client = s3_server.client()
    location = s3_server.location(bucket, prefix)
    keys = [f"{prefix}/{name}".lstrip("/") for name in (OWN, *FOREIGN)]
    ours = keys[0]
    begun = {
        key: client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        for key in (*keys, *([OWN] if prefix else []))
    }

    def start():
        with contextlib.ExitStack() as stack, caplog.at_level(logging.INFO, "logmirror.stores"):
            begin_writing(location, "w", stack, leftovers=Leftovers(*own("orders")))
        found = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        return {upload["Key"] for upload in found}

    assert start() == set(begun), "all are young: they may belong to a live mirror"
    assert not caplog.records
    monkeypatch.setattr(s3_leftovers, "LEFTOVER_AGE_MS", -60_000)

    assert start() == set(begun) - {ours}

    (record,) = caplog.records
    assert record.facts == {"location": str(location), "count": 1}
    for key in set(begun) - {ours}:
        part = {"Bucket": bucket, "Key": key, "UploadId": begun[key]}
        etag = client.upload_part(**part, PartNumber=1, Body=b"x")["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
        client.complete_multipart_upload(**part, MultipartUpload=parts)


def test_an_upload_that_was_aborted_is_staged_again(s3_server, bucket, monkeypatch):
    monkeypatch.setattr(s3_leftovers, "LEFTOVER_AGE_MS", -60_000)
    store = S3Store(s3_server.location(bucket, "p"))
    token = staged(store, b"x", travels=True, name=OWN)

    assert S3Store(s3_server.location(bucket, "p")).sweep(*own("orders")) == 1

    with pytest.raises(UnavailableError):
        store.publish(token, OWN)
    store.publish(staged(store, b"x", travels=True, name=OWN), OWN)
    assert store.read(OWN) == b"x"


class _Uploads:
    """Returns listings of uploads, two at a time, and records the aborted ones."""

    def __init__(self, began, date=None):
        self.began, self.aborted = began, []
        self.keys = [f"p/orders/{number}/{0:020d}-{9:020d}.parquet" for number in range(len(began))]
        self.headers = {"date": date} if date else {}

    def read(self, operation, **arguments):
        assert operation == "list_multipart_uploads"
        assert arguments["Prefix"] == "p/orders/"
        found = [key for key in self.keys if key > arguments.get("KeyMarker", "")]
        uploads = [
            {"Key": key, "UploadId": f"id of {key}", **self.began[self.keys.index(key)]}
            for key in found[:2]
        ]
        markers = {"NextKeyMarker": found[:2][-1], "NextUploadIdMarker": "x"}
        return {
            "Uploads": uploads,
            "IsTruncated": len(found) > 2,
            "ResponseMetadata": {"HTTPHeaders": self.headers},
            **markers,
        }

    def write(self, operation, **arguments):
        assert operation == "abort_multipart_upload"
        self.aborted.append(arguments)


def begun_at(age_s):
    return {"Initiated": datetime(2026, 1, 1, 12, tzinfo=UTC) - timedelta(seconds=age_s)}


def test_all_old_uploads_are_aborted_however_many_listings_they_take():
    uploads = _Uploads([begun_at(9999)] * 5, "Thu, 01 Jan 2026 12:00:00 GMT")
    store = S3Store(S3Location(bucket="bucket", prefix="p"), calls=uploads)

    assert store.sweep(*own("orders")) == 5

    assert uploads.aborted == [{"Key": key, "UploadId": f"id of {key}"} for key in uploads.keys]


@pytest.mark.parametrize("date", ["Thu, 01 Jan 2026 12:00:00 GMT", None, "today"])
def test_the_age_of_an_upload_is_that_by_the_stores_clock(date):
    """This machine's clock is used only for a store that does not report its own."""
    clock = SteppingClock(int(datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp() * 1000))
    if date and date != "today":
        clock.wall_ms += 86_400_000  # a day ahead: every upload seems old
    uploads = _Uploads([begun_at(3590), begun_at(3610), {}], date)
    store = S3Store(S3Location(bucket="bucket", prefix="p"), calls=uploads, clock=clock)

    assert store.sweep(*own("orders")) == 1

    assert [arguments["Key"] for arguments in uploads.aborted] == [uploads.keys[1]]


# Is create-only meant?


def test_a_store_that_means_it_is_proven_once_and_remembered(s3_server, bucket, proxy, store):
    store.prove_create_only()
    first = proxy.count
    store.prove_create_only()

    assert proxy.count - first == 2
    assert "create-only" in list(store.names(".logmirror/probes"))


@pytest.mark.parametrize("lost", [1, 2, 3, 4, 5, "of a later start"])
def test_a_lost_response_is_no_sign_of_a_store_that_replaces(bucket, proxy, store, lost):
    if lost == "of a later start":
        store.prove_create_only()
    before = 0 if lost == "of a later start" else lost - 1
    passed_on = [Fault("", "PutObject", times=1)] * before
    proxy.spoil_some(iter([*passed_on, Fault("lose-response", "PutObject")]))
    with contextlib.suppress(UnavailableError):
        store.prove_create_only()
    assert proxy.spoiled == before + 1
    proxy.spoil()
    store.prove_create_only()


@pytest.mark.parametrize("known", [False, True])
def test_a_store_that_replaces_is_refused(s3_server, bucket, proxy, store, known):
    if known:
        store.prove_create_only()
    proxy.forget_condition = True

    with pytest.raises(UsageError) as caught:
        store.prove_create_only()

    assert "replaces" in caught.value.message
