"""Destinations in S3: settings are read, invalid ones are reported, secrets are not shown.

Method: whole settings are compared with the file, in both of its shapes; a valid file is changed in
one place, and all problems are compared.
"""

import pickle

import pytest

from kit.runs.configs import complaints, folder, mirror, settings_of, shared_mirror, text_of
from logmirror.app.policy import bucket_policies, conditional_write_policies
from logmirror.config.settings import S3Credentials, S3Destination, load_text

CANARY = "Tr0ub4dor&3"
AT = "mirrors[0].destinations[0]"
FLUSH = {"max-time-ms": 1, "max-bytes": 1, "max-offsets": 1}


def bucket(**changes):
    """A valid destination."""
    base = {"type": "s3", "bucket": "archive"}
    return base | {key.replace("_", "-"): value for key, value in changes.items()}


def only(settings):
    (destination,) = settings.mirrors[0].destinations
    return destination


def test_a_minimal_bucket_gets_every_default():
    assert only(settings_of(mirror("orders", destinations=[bucket()]))) == S3Destination(
        name="orders", bucket="archive"
    )


def test_every_key_of_a_bucket_is_read():
    every_key = bucket(
        name="lake",
        prefix="/kafka/eu/",
        region="eu-central-1",
        endpoint="https://s3.example:9000/",
        path_style=False,
        ca_file="/etc/ca.pem",
        sse="aws:kms",
        kms_key_id="key",
        checksums="when-required",
        require_atomic_create=False,
        drift_check_ms=5000,
        encryption="none",
        credentials={
            "write": {"access-key-id": "w", "secret-access-key": CANARY, "session-token": "t"},
            "read": {
                "profile": "reader",
                "role-arn": "arn:aws:iam::1:role/r",
                "sts-endpoint": "https://sts.example/",
            },
        },
    )

    found = only(settings_of(mirror(destinations=[every_key])))

    assert found == S3Destination(
        name="lake",
        bucket="archive",
        prefix="kafka/eu",
        region="eu-central-1",
        endpoint="https://s3.example:9000",
        path_style=False,
        ca_file="/etc/ca.pem",
        sse="aws:kms",
        kms_key_id="key",
        checksums="when-required",
        require_atomic_create=False,
        drift_check_ms=5000,
        write=S3Credentials(access_key_id="w", secret_access_key=CANARY, session_token="t"),
        read=S3Credentials(
            profile="reader", role_arn="arn:aws:iam::1:role/r", sts_endpoint="https://sts.example"
        ),
    )
    assert CANARY not in repr(found)
    assert pickle.loads(pickle.dumps(found)) == found


def test_one_identity_is_for_writing_and_reading():
    keys = {"access-key-id": "k", "secret-access-key": "s"}
    found = only(settings_of(mirror(destinations=[bucket(credentials=keys)])))
    assert found.write == found.read == S3Credentials(access_key_id="k", secret_access_key="s")


def test_path_style_is_the_default_with_an_endpoint():
    found = only(settings_of(mirror(destinations=[bucket(endpoint="http://h:9000")])))
    assert found.path_style


def test_access_keys_can_come_from_environment_variables_as_in_mirror_v3():
    names = {"access-key-id-env": "KEY", "secret-access-key-env": "SECRET"}
    text = text_of(mirror(destinations=[bucket(credentials={"write": names, "read": names})]))

    found = only(load_text(text, environ={"KEY": "k", "SECRET": "s"}))

    assert found.write == found.read == S3Credentials(access_key_id="k", secret_access_key="s")


def test_a_bucket_can_be_shared_by_all_mirrors():
    shared = bucket(prefix="p", format="ndjson", flush=FLUSH)
    settings = settings_of(shared_mirror(topic="orders"), destination=shared)
    assert only(settings) == S3Destination(name="orders", bucket="archive", prefix="p")
    assert settings.mirrors[0].format == "ndjson"


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        (
            {"bucket": "Archive"},
            ".bucket",
            "is not a legal bucket name: 3 to 63 lower-case letters, digits, dots, dashes",
        ),
        ({"prefix": "a//b"}, ".prefix", "must be names separated by single slashes"),
        ({"prefix": ".logmirror"}, ".prefix", "must not contain a name that begins with a dot"),
        ({"endpoint": "h:9000"}, ".endpoint", "must be http://host:port or https://host:port"),
        ({"kms-key-id": "k"}, ".kms-key-id", "is only for sse: aws:kms"),
        ({"sse": "aes"}, ".sse", "must be AES256 or aws:kms"),
        ({"encryption": {"key-id": "k"}}, ".encryption", "is not supported by this version"),
        ({"compaction": "log"}, ".compaction", "unknown key"),
        ({"bukket": "x"}, ".bukket", "unknown key"),
        (
            {"credentials": {"access-key-id": "k"}},
            ".credentials.secret-access-key",
            "is required with access-key-id",
        ),
        (
            {"credentials": {"profile": "p", "access-key-id": "k", "secret-access-key": "s"}},
            ".credentials.profile",
            "access-key-id is set too",
        ),
        (
            {"credentials": {"read": {"session-token": "t"}}},
            ".credentials.read.session-token",
            "requires an access-key-id",
        ),
    ],
)
def test_invalid_settings_are_reported(change, key, message):
    assert complaints(mirror(destinations=[bucket() | change])) == {f"{AT}{key}": message}


def test_an_unset_variable_is_reported():
    names = {"access-key-id-env": "NOT_SET_KEY", "secret-access-key-env": "NOT_SET_SECRET"}
    assert complaints(mirror(destinations=[bucket(credentials=names)])) == {
        f"{AT}.credentials.access-key-id-env": "the environment variable NOT_SET_KEY is not set",
        f"{AT}.credentials.secret-access-key-env": (
            "the environment variable NOT_SET_SECRET is not set"
        ),
    }


def test_two_mirrors_cannot_write_one_prefix():
    one = mirror("a", destinations=[bucket(name="x", prefix="/p")])
    two = mirror("b", destinations=[bucket(name="x", prefix="p/")])
    elsewhere = mirror("c", destinations=[bucket(name="x", prefix="p", endpoint="http://h:1")])
    found = complaints(one, two, elsewhere)
    assert list(found) == ["mirrors[1].destinations[0]"]
    assert "both write" in found["mirrors[1].destinations[0]"]


def test_a_bucket_needs_a_flush():
    without = {key: value for key, value in mirror().items() if key != "flush"}
    assert complaints(without | {"destinations": [bucket()]}) == {"mirrors[0].flush": "is required"}


def test_a_mirror_can_have_a_directory_and_a_bucket():
    settings = settings_of(mirror(destinations=[folder(name="f"), bucket(name="b")]))
    assert [d.name for d in settings.mirrors[0].destinations] == ["f", "b"]


def test_minimal_policies_never_allow_delete():
    keys = {"access-key-id": "k", "secret-access-key": "s"}
    other = {"access-key-id": "o", "secret-access-key": "s"}
    settings = settings_of(
        mirror("a", destinations=[bucket(prefix="p", credentials=keys)]),
        mirror(
            "b", destinations=[bucket(bucket="two", credentials={"write": keys, "read": other})]
        ),
    )

    found = bucket_policies(settings)

    assert list(found) == ["archiver", "writer", "reader"]
    assert "Delete" not in str(found)
    actions = {role: {a for s in p["Statement"] for a in s["Action"]} for role, p in found.items()}
    assert actions["writer"] == {"s3:PutObject", "s3:AbortMultipartUpload"}
    assert actions["reader"] == {"s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:GetObject"}
    assert actions["archiver"] == actions["writer"] | actions["reader"]
    resources = {s["Resource"] for s in found["archiver"]["Statement"]}
    bucket_arn = "arn:aws:s3:::archive"
    assert resources == {bucket_arn, f"{bucket_arn}/p/*", f"{bucket_arn}/p/a/*"}
    (aborting,) = [
        s for s in found["archiver"]["Statement"] if "s3:AbortMultipartUpload" in s["Action"]
    ]
    assert aborting["Resource"] == f"{bucket_arn}/p/a/*"


def test_a_buckets_policy_denies_writes_without_the_condition_and_only_to_our_keys():
    settings = settings_of(
        mirror("a", destinations=[bucket(prefix="p")]),
        mirror("b", destinations=[bucket()]),
        mirror("c", destinations=[bucket(bucket="two", require_atomic_create=False)]),
    )

    found = conditional_write_policies(settings)

    assert list(found) == ["archive"]
    statements = found["archive"]["Statement"]
    assert [sorted(s["Resource"]) for s in statements] == [
        ["arn:aws:s3:::archive/p/.logmirror/*", "arn:aws:s3:::archive/p/a/*"],
        ["arn:aws:s3:::archive/.logmirror/*", "arn:aws:s3:::archive/b/*"],
    ]
    for statement in statements:
        assert (statement["Effect"], statement["Principal"]) == ("Deny", "*")
        assert statement["Action"] == ["s3:PutObject"]
        assert statement["Condition"] == {
            "Null": {"s3:if-none-match": "true"},
            "Bool": {"s3:ObjectCreationOperation": "true"},
        }


def test_compaction_may_delete_objects_and_a_reader_may_not():
    keys, other = ({"access-key-id": k, "secret-access-key": "s"} for k in "ko")
    settings = settings_of(
        mirror("a", destinations=[bucket(prefix="p", credentials={"write": keys, "read": other})])
    )

    found = bucket_policies(settings, compacts=True)

    actions = {role: {a for s in p["Statement"] for a in s["Action"]} for role, p in found.items()}
    assert actions["writer"] == {"s3:PutObject", "s3:AbortMultipartUpload", "s3:DeleteObject"}
    assert "Delete" not in str(found["reader"])
    (deleting,) = [s for s in found["writer"]["Statement"] if "s3:DeleteObject" in s["Action"]]
    assert deleting["Resource"] == "arn:aws:s3:::archive/p/*"
