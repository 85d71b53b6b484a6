"""Identities, credentials, encryption and checksums of an S3 store.

Method: permissions, certificates and checksums with a real server, which enforces them; roles and
encryption with a fake, which supports them, behind a proxy that records the header of each request.
"""

import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime

import botocore.credentials
import pytest

from kit.fakes.s3_proxy import Fault, S3Proxy
from kit.fakes.scripted import (
    TOPIC_ID,
    Log,
    ScriptedClient,
    SteppingClock,
    archive_spec,
    batches,
    run_slice,
)
from kit.runs.commands import logmirror, mirror, write_config
from kit.servers.s3 import S3Server
from logmirror.errors import CorruptionError, UnavailableError, UsageError
from logmirror.locations import S3Identity, S3Location
from logmirror.mirror.ports import FlowId, Slice
from logmirror.model import Trigger
from logmirror.stores import s3_calls, s3_leftovers
from logmirror.stores.s3 import S3Store
from logmirror.stores.s3_policy import policies

pytestmark = pytest.mark.xdist_group("s3")

ROLE = "arn:aws:iam::123456789012:role/archiver"


def staged(store, data, *, name="f/b", travels=True):
    staged_object = store.stage("an object")
    staged_object.write(data)
    return staged_object.finish(name, travels=travels)


@pytest.fixture
def noting(fake_s3):
    with S3Proxy(fake_s3.endpoint, lambda _path: None) as proxy:
        yield proxy


def keys_of(proxy):
    """Which access key has signed which requests."""
    found = {}
    for operation, head in proxy.heads:
        key = head["authorization"].partition("Credential=")[2].partition("/")[0]
        found.setdefault(key, set()).add(operation)
    return found


# Permissions


@pytest.fixture
def archive(s3_server):
    """A bucket in which a writer and a reader may do what `logmirror policy print` allows."""
    bucket = s3_server.new_bucket()
    writer, reader = s3_server.new_user(), s3_server.new_user()
    location = replace(s3_server.location(bucket, "p"), write=writer, read=reader)
    reported = policies([(location, "f")])
    allowed = [(writer, reported["writer"]["Statement"]), (reader, reported["reader"]["Statement"])]
    s3_server.allow(bucket, *allowed)
    return location, allowed


def test_two_identities_with_the_policies_that_we_print_can_do_all_there_is_to_do(
    archive, monkeypatch
):
    monkeypatch.setattr(s3_leftovers, "LEFTOVER_AGE_MS", -60_000)
    location, _ = archive
    store = S3Store(location)
    store.prove_create_only()
    store.create("f/a", b"a")
    store.publish(staged(store, b"b"), "f/b")
    store.publish(staged(store, b"c", name="f/c", travels=False), "f/c")
    left = staged(store, b"d", name="f/d")

    assert store.sweep(["f"], lambda name: name == "f/d") == 1

    with pytest.raises(UnavailableError):
        store.publish(left, "f/d")
    assert store.tail("f").names == ["a", "b", "c"]
    assert store.read("f/b") == b"b"
    with store.open("f/c") as file:
        assert file.read() == b"c"
    elsewhere = staged(store, b"e", name="payroll/e")
    store.discard(elsewhere)  # the policy does not allow it: nothing is aborted
    store.publish(elsewhere, "payroll/e")
    with pytest.raises(UsageError) as caught:
        store.delete("f/a")
    assert caught.value.facts["permission"] == "s3:DeleteObject"


@pytest.mark.mirror_v3("S3-19")
@pytest.mark.parametrize(
    ("role", "action", "permission"),
    [
        (0, lambda store: store.create("f/b", b"x"), "s3:PutObject"),
        (0, lambda store: staged(store, b"x"), "s3:PutObject"),
        (1, lambda store: list(store.names("f")), "s3:ListBucket"),
        (1, lambda store: store.read("f/a"), "s3:GetObject"),
        (1, lambda store: store.open("f/a"), "s3:GetObject"),
        (1, lambda store: store.sweep(["f"], bool), "s3:ListBucketMultipartUploads"),
    ],
)
def test_a_permission_that_is_taken_away_in_mid_run_is_named(
    s3_server, archive, role, action, permission
):
    location, allowed = archive
    store = S3Store(location)
    store.create("f/a", b"x")
    list(store.names("f"))
    s3_server.allow(location.bucket, allowed[1 - role])

    with pytest.raises(UsageError, match=permission) as caught:
        action(store)

    assert caught.value.facts["permission"] == permission
    assert "policy print" in caught.value.hint


@pytest.fixture
def filled(s3_server, archive, tmp_path):
    """An archive of three objects, its configuration for a reader, and a denial of one object."""
    location, allowed = archive
    spec = archive_spec(format="native", max_offsets=10)
    flow = FlowId(mirror="m", destination="f", topic="t", partition=0)
    slice_ = Slice(
        flow=flow, topic_id=TOPIC_ID, compacted=False, first=0, end=30, tail=Trigger.EXPLICIT
    )
    store = S3Store(location)
    run_slice(ScriptedClient([Log(batches(0, 30))]), store, slice_, spec)
    names = list(store.names(flow.folder))
    keys = {
        "access-key-id": location.read.access_key_id,
        "secret-access-key": location.read.secret_access_key,
    }
    bucket = s3_server.destination(location.bucket, name="f", prefix="p", credentials=keys)
    one = mirror("t", "127.0.0.1:1", "", name="m", form="native", destinations=[bucket])
    config = write_config(tmp_path / "config.json", one)

    def deny(name):
        where = f"arn:aws:s3:::{location.bucket}/p/{name}"
        denial = {"Effect": "Deny", "Action": ["s3:GetObject"], "Resource": [where]}
        s3_server.allow(location.bucket, *allowed, (location.read, [denial]))

    return config, [f"{flow.folder}/{name}" for name in names], deny


def test_what_may_not_be_read_is_not_reported_as_damaged(filled):
    config, names, deny = filled
    assert len(names) == 3
    deny(names[1])

    result = logmirror("verify", "--deep", "-c", config)

    assert result.returncode == UsageError.exit_code, result.stdout + result.stderr
    assert "usage: the store denied access: missing permission s3:GetObject" in result.stdout
    assert names[1].rpartition("/")[2] in result.stdout
    assert "hint: check the credentials and their permissions" in result.stdout


@pytest.mark.parametrize("denied", ["an object", "another bucket"])
def test_a_denial_does_not_hide_what_is_damaged(s3_server, archive, filled, denied):
    config, names, deny = filled
    client, damaged = s3_server.client(), {"Bucket": archive[0].bucket, "Key": f"p/{names[0]}"}
    sound = client.get_object(**damaged)["Body"].read()
    client.put_object(**damaged, Body=sound[:-1] + bytes([sound[-1] ^ 1]))
    if denied == "an object":
        deny(names[2])
    else:
        written = json.loads(config.read_text())
        [destinations] = [one["destinations"] for one in written["mirrors"]]
        destinations.append({**destinations[0], "name": "g", "bucket": s3_server.new_bucket()})
        config.write_text(json.dumps(written))

    result = logmirror("verify", "--deep", "-c", config)

    assert result.returncode == CorruptionError.exit_code, result.stdout + result.stderr
    assert "corruption: " in result.stdout
    assert names[0].rpartition("/")[2] in result.stdout
    assert "the store denied access" in result.stdout + result.stderr


# Roles and tokens


def test_a_session_token_goes_with_every_request(fake_s3, noting):
    identity = S3Identity(access_key_id="k", secret_access_key="s", session_token="the token")
    location = fake_s3.location(fake_s3.new_bucket(), read=identity, write=identity)
    store = S3Store(replace(location, endpoint=noting.endpoint))

    store.create("f/a", b"x")
    assert store.read("f/a") == b"x"

    assert [head["x-amz-security-token"] for _, head in noting.heads] == ["the token"] * 2


class _Later(SteppingClock):
    """A wall clock that begins now and is moved by hand."""

    def __init__(self):
        super().__init__(int(datetime.now(UTC).timestamp() * 1000))


def test_a_role_is_assumed_once_with_its_own_keys_and_renewed_before_it_ends(
    fake_s3, noting, monkeypatch
):
    writer = S3Identity(
        access_key_id="who-assumes",
        secret_access_key="s",
        role_arn=ROLE,
        sts_endpoint=noting.endpoint,
    )
    reader = S3Identity(access_key_id="who-reads", secret_access_key="s")
    location = fake_s3.location(fake_s3.new_bucket(), read=reader, write=writer)
    clock = _Later()
    monkeypatch.setattr(
        botocore.credentials,
        "_local_now",
        lambda: datetime.fromtimestamp(clock.now_ms() / 1000, UTC),
    )
    store = S3Store(replace(location, endpoint=noting.endpoint), clock=clock)

    for number in range(3):
        store.create(f"f/{number}", b"x")
    assert list(store.names("f")) == ["0", "1", "2"]

    first = keys_of(noting)
    assert first.pop("who-reads") == {"ListObjectsV2"}
    assert first.pop("who-assumes") == {"AssumeRole"}
    ((assumed, done),) = first.items()
    assert done == {"PutObject"}

    clock.wall_ms += 58 * 60_000  # of the hour that moto grants
    store.create("f/3", b"x")

    (renewed,) = set(keys_of(noting)) - {"who-reads", "who-assumes", assumed}
    assert keys_of(noting)[renewed] == {"PutObject"}


def test_a_role_that_may_not_be_assumed_is_named(fake_s3, noting):
    writer = S3Identity(
        access_key_id="k", secret_access_key="s", role_arn=ROLE, sts_endpoint=noting.endpoint
    )
    location = fake_s3.location(fake_s3.new_bucket(), write=writer)
    noting.spoil(Fault("denied", method="POST"))

    with pytest.raises(UsageError) as caught:
        S3Store(location).create("f/a", b"x")

    assert caught.value.facts["permission"] == "sts:AssumeRole"


def test_a_service_of_roles_that_does_not_respond_is_waited_for(fake_s3, monkeypatch):
    monkeypatch.setattr(s3_calls, "DEADLINE_MS", 200)
    writer = S3Identity(
        access_key_id="k",
        secret_access_key="s",
        role_arn=ROLE,
        sts_endpoint="http://127.0.0.1:9",
    )
    with pytest.raises(UnavailableError):
        S3Store(fake_s3.location(fake_s3.new_bucket(), write=writer)).create("f/a", b"x")


# Encryption


@pytest.mark.parametrize(("sse", "key"), [("AES256", ""), ("aws:kms", ""), ("aws:kms", "the-key")])
def test_encryption_is_asked_for_where_an_object_begins(fake_s3, noting, sse, key, monkeypatch):
    location = fake_s3.location(fake_s3.new_bucket(), sse=sse, kms_key_id=key)
    store = S3Store(replace(location, endpoint=noting.endpoint))

    store.create("f/a", b"x")
    store.publish(staged(store, b"y"), "f/b")
    assert list(store.names("f")) == ["a", "b"]

    header = "x-amz-server-side-encryption"
    reported = {operation: head for operation, head in noting.heads if header in head}
    assert set(reported) == {"PutObject", "CreateMultipartUpload"}
    for head in reported.values():
        assert head[header] == sse
        assert head.get(f"{header}-aws-kms-key-id", "") == key
    for name in ("f/a", "f/b"):
        kept = fake_s3.client().head_object(Bucket=location.bucket, Key=name)
        assert kept["ServerSideEncryption"] == sse
        assert kept.get("SSEKMSKeyId", "").endswith(key)


# Certificates


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory, certificates):
    with S3Server(tmp_path_factory.mktemp("s3-tls"), certificates.broker) as server:
        yield server


def test_a_store_whose_authority_is_ours_is_trusted_and_no_other(
    tls_server, certificates, monkeypatch
):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
    bucket = tls_server.new_bucket()
    monkeypatch.delenv("AWS_CA_BUNDLE")
    location = tls_server.location(bucket)

    store = S3Store(replace(location, ca_file=str(certificates.authority)))
    store.create("f/a", b"x")
    store.publish(staged(store, b"y"), "f/b")

    assert store.read("f/b") == b"y"
    for ca_file in ("", str(certificates.other_authority)):
        with pytest.raises(UsageError, match="certificate"):
            S3Store(replace(location, ca_file=ca_file)).read("f/a")


# Checksums


@pytest.mark.parametrize("mode", ["when_supported", "when_required"])
def test_a_body_is_checked_by_the_store_whatever_the_mode(s3_server, proxy, mode):
    """Either by a checksum or by the signature: a byte that changes in transit is detected."""
    location = s3_server.location(s3_server.new_bucket(), endpoint=proxy.endpoint)
    store = S3Store(replace(location, checksums=mode))
    for operation in ("PutObject", "UploadPart"):
        proxy.spoil(Fault("wrong-body", method=operation))
        if operation == "PutObject":
            store.create("f/a", b"content")
        else:
            store.publish(staged(store, b"content"), "f/b")

    assert proxy.spoiled == 2
    assert store.read("f/a") == store.read("f/b") == b"content"
    sent = [head for operation, head in proxy.heads if operation in {"PutObject", "UploadPart"}]
    assert all(head["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD" for head in sent)
    has_checksum = [any(name.startswith("x-amz-checksum") for name in head) for head in sent]
    assert has_checksum == [mode == "when_supported"] * len(sent)


def test_over_tls_too_a_body_without_a_checksum_is_signed(tls_server, certificates, monkeypatch):
    """Else some servers keep the half that a dying client has sent as if it were all."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
    location = replace(
        tls_server.location(tls_server.new_bucket()),
        ca_file=str(certificates.authority),
        checksums="when_required",
    )
    store, sent = S3Store(location), []
    client = store._calls._client(location.write)  # noqa: SLF001  # TLS hides what is sent
    client.meta.events.register(
        "before-send.s3.PutObject",
        lambda request, **_: sent.append(request.headers["x-amz-content-sha256"]),
    )

    store.create("f/a", b"content")

    assert sent == [hashlib.sha256(b"content").hexdigest().encode()]


# Addresses


def test_an_endpoint_that_is_no_url_is_refused():
    keys = S3Identity(access_key_id="a", secret_access_key="b")
    location = S3Location(bucket="b", endpoint="127.0.0.1:9000", write=keys, read=keys)
    with pytest.raises(UsageError, match="the address of the store is not valid") as refused:
        S3Store(location).tail("f")
    assert "http://" in refused.value.hint
    assert "127.0.0.1:9000" in str(refused.value)


def test_a_store_without_tls_is_not_taken_for_one_with_a_wrong_certificate(s3_server):
    location = s3_server.location("b", endpoint=s3_server.endpoint.replace("http:", "https:"))
    with pytest.raises(UsageError, match="the store responds without TLS") as refused:
        S3Store(location).tail("f")
    assert "http://" in refused.value.hint
