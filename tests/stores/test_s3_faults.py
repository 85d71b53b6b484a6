"""For every fault of every request, an object exists once and whole, or not at all.

Method: a table of every request that the store sends and every way in which a server or a network
fails it once (F7). The scene with the request runs against a real server, with the request spoiled.
It succeeds, or ends in the error of the table; then it runs again without a fault and must succeed.
The result is read from the server's own files, and the proxy has recorded that each name became
visible once. The same scenes also run with many faults in sequence.
"""

import contextlib
import itertools
import random
from dataclasses import dataclass
from datetime import timedelta

import botocore.auth
import pytest

from kit.fakes.s3_proxy import Fault
from logmirror.errors import OutcomeUnknownError, UnavailableError, UsageError
from logmirror.stores import s3_calls
from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.s3 import S3Store

pytestmark = pytest.mark.xdist_group("s3")

DATA = bytes(range(256)) * 80


@dataclass
class Stage:
    """A bucket behind a proxy, and what was staged in it."""

    bucket: object
    store: S3Store
    token: str = ""


def stage(scene):
    staged = scene.store.stage("an object")
    staged.write(DATA)
    scene.token = staged.finish("f/a", travels=True)


def create(scene):
    try:
        scene.store.create("f/a", DATA)
    except AlreadyExistsError:
        assert scene.store.read("f/a") == DATA


def publish(scene):
    try:
        scene.store.publish(scene.token, "f/a")
    except UnavailableError:  # gone, as the contract allows: stage again
        stage(scene)
        scene.store.publish(scene.token, "f/a")


def complete(scene):
    """Publish what was staged; once it has failed, what a mirror does: look, then decide."""
    if "a" not in scene.store.names("f"):
        publish(scene)


def stage_and_publish(scene):
    stage(scene)
    scene.store.publish(scene.token, "f/a")


def open_and_read(scene):
    with scene.store.open("f/a") as file:
        assert file.read() == DATA


def read(scene):
    assert scene.store.read("f/a") == DATA


def list_names(scene):
    assert list(scene.store.names("f")) == ["a"]


def discard(scene):
    scene.store.discard(scene.token)


def sweep(scene):
    assert scene.store.sweep(["f"], lambda name: name == "f/a") <= 1


def nothing(_scene):
    pass


SCENES = {
    "PutObject": (nothing, create),
    "ListObjectsV2": (create, list_names),
    "GetObject": (create, read),
    "HeadObject": (create, open_and_read),
    "CreateMultipartUpload": (nothing, stage_and_publish),
    "UploadPart": (nothing, stage_and_publish),
    "CompleteMultipartUpload": (stage, complete),
    "AbortMultipartUpload": (stage, discard),
    "ListMultipartUploads": (stage, sweep),
}
"""For each request what comes before, and the scene in which it occurs."""

WITHOUT_OBJECT = {"AbortMultipartUpload", "ListMultipartUploads"}
WITH_BODY = {"PutObject", "UploadPart"}

FAULTS = {
    "409": set(SCENES),
    "429": set(SCENES),
    "500": set(SCENES),
    "503": set(SCENES),
    "lose-response": set(SCENES),
    "cut-response": set(SCENES),
    "reset": set(SCENES),
    "silence": set(SCENES),
    "late": set(SCENES),
    "denied": set(SCENES),
    "skewed": set(SCENES) - {"HeadObject"},  # whose responses have no body with the code
    "cut-body": WITH_BODY | {"CompleteMultipartUpload"},
    "wrong-body": WITH_BODY,
    "wrong-response": {"GetObject"},
    "wrong-etag": {"PutObject", "UploadPart"},
    "200-error": {"CompleteMultipartUpload"},
}
"""Each fault, and the requests that can meet it."""

PERMISSIONS = {
    "PutObject": "s3:PutObject",
    "ListObjectsV2": "s3:ListBucket",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
}

CELLS = [(op, fault) for fault, of in FAULTS.items() for op in SCENES if op in of]


def expected_error(operation, fault):
    """The error of a cell; None: it ends well. Aborting is tidying up, and never fails."""
    if operation == "AbortMultipartUpload":
        return None
    if fault in {"denied", "skewed"}:
        return UsageError
    # The reported tag is not the part's: the upload is useless, and staged again.
    return UnavailableError if (operation, fault) == ("UploadPart", "wrong-etag") else None


@pytest.fixture
def scene(s3_server, proxy, monkeypatch):
    monkeypatch.setattr(s3_calls, "_READ_TIMEOUT_S", 0.5)
    monkeypatch.setattr(s3_calls, "_FIRST_PAUSE_MS", 5)
    bucket = s3_server.new_bucket()
    store = S3Store(s3_server.location(bucket, "p", endpoint=proxy.endpoint))
    return Stage(s3_server.files(bucket) / "p/f", store)


@pytest.mark.parametrize(("operation", "fault"), CELLS, ids=[f"{op}-{f}" for op, f in CELLS])
def test_a_request_that_fails_once(proxy, scene, operation, fault):
    before, play = SCENES[operation]
    before(scene)
    proxy.spoil(Fault(fault, method=operation))
    error = expected_error(operation, fault)

    if error is None:
        play(scene)
    else:
        with pytest.raises(error) as caught:
            play(scene)
        if fault == "denied":
            assert caught.value.facts["permission"] == PERMISSIONS[operation]
            assert PERMISSIONS[operation] in caught.value.message
        if fault == "skewed":
            assert "clock" in caught.value.message
            assert caught.value.facts["store_says"] == "Thu, 01 Jan 2026 00:00:00 GMT"

    assert proxy.spoiled == 1, "the scene has met the fault"
    if error is not None:
        play(scene)
    found = {path.name: path.read_bytes() for path in scene.bucket.glob("*")}
    assert found == ({} if operation in WITHOUT_OBJECT else {"a": DATA})
    assert len(proxy.created) == len(found)


def test_clock_skew_is_reported_with_the_stores_time(s3_server, monkeypatch):
    """The server's own check of a signature's time; the signer's clock is moved."""
    bucket, now = s3_server.new_bucket(), botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: now() - timedelta(hours=2))
    store = S3Store(s3_server.location(bucket))

    with pytest.raises(UsageError, match="clock") as caught:
        store.create("f/a", b"x")

    assert caught.value.facts["store_says"].endswith("GMT")


def test_many_faults_one_after_the_other_leave_each_object_once_and_whole(
    s3_server, proxy, scene, monkeypatch
):
    monkeypatch.setattr(s3_calls, "_READ_TIMEOUT_S", 5)
    monkeypatch.setattr(s3_calls, "DOWN_MS", 0)
    chooser = random.Random(7)
    passing = sorted(set(FAULTS) - {"denied", "skewed", "silence", "late"})
    asked = set(SCENES) - {
        "GetObject",
        "HeadObject",
        "AbortMultipartUpload",
        "ListMultipartUploads",
    }
    cells = [(op, fault) for op, fault in CELLS if fault in passing and op in asked]
    drawn = (
        None if chooser.random() < 0.5 else Fault(fault, method=operation)
        for operation, fault in iter(lambda: chooser.choice(cells), None)
    )
    proxy.spoil_some(drawn)
    made = {}

    for number in range(40):
        name, data = f"f/{number:03d}", b"%d" % number * 1000
        made[name.removeprefix("f/")] = data
        while True:
            with contextlib.suppress(UnavailableError, OutcomeUnknownError):
                with_timeout(scene.store, name, data, travels=bool(number % 2))
                break

    proxy.spoil_some(itertools.repeat(None))
    proxy.spoil()
    assert {p.name: p.read_bytes() for p in scene.bucket.glob("*")} == made
    assert len(proxy.created) == len(set(proxy.created)) == len(made)
    assert proxy.spoiled > 20


def with_timeout(store, name, data, *, travels):
    """What a writer does: look, stage, publish; what is there with its content is its success."""
    if name.removeprefix("f/") in store.names("f"):
        assert store.read(name) == data
        return
    staged = store.stage("x")
    staged.write(data)
    try:
        store.publish(staged.finish(name, travels=travels), name)
    except AlreadyExistsError:
        assert store.read(name) == data
