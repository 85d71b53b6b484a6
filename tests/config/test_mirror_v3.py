"""Files of mirror-v3: a key has the same meaning, or is refused by name with what to do instead.

Method: whole files as its users write them, in both of its shapes. The IDs are those of mirror-v3's
list of checks (CFG, ENA, ENV, DAY, NCF), except those that other files in this directory cover.
"""

import json

import pytest

from kit.runs.commands import logmirror
from kit.runs.configs import (
    complaints,
    folder,
    mirror,
    problems_of,
    settings_of,
    shared_mirror,
    text_of,
)
from logmirror.config.settings import (
    FilesystemDestination,
    KafkaDestination,
    S3Destination,
    load_text,
)

FLUSH = {"max-time-ms": 60000, "max-bytes": 1048576, "max-offsets": 1000}
CLUSTER = {"name": "standby", "type": "kafka", "bootstrap-servers": "kafka-b:9092"}
BUCKET = {
    "name": "lake",
    "type": "s3",
    "endpoint": "http://minio:9000",
    "region": "eu-west-1",
    "bucket": "archive",
    "prefix": "kafka",
    "credentials": {
        "write": {"access-key-id-env": "WRITE_KEY", "secret-access-key-env": "WRITE_SECRET"},
        "read": {"access-key-id-env": "READ_KEY", "secret-access-key-env": "READ_SECRET"},
    },
    "encryption": "none",
}
VARIABLES = ["WRITE_KEY", "WRITE_SECRET", "READ_KEY", "READ_SECRET"]
UNSUPPORTED = "is not supported by this version"

DUAL = """\
# ${NOT_SET_AND_ONLY_IN_A_COMMENT}
mirrors:
  - name: orders
    source:
      bootstrap-servers: ${KAFKA:-kafka-a:9092}
      group-id: mirror-v3-orders
    topic: ${TOPIC}
    partition: 3
    format: parquet
    compression: snappy
    timestamp-mode: destination
    flush:
      max-time-ms: 600000
      max-bytes: 18446744073709551615
      max-offsets: 100000
      daily:
        at-utc: 23:59:59
    enabled: ${ORDERS:-true}
    destinations:
      - name: files
        type: filesystem
        root: /var/backup
        affects-readiness: false
      - name: lake
        type: s3
        endpoint: ${ENDPOINT:-}
        region: eu-west-1
        bucket: archive
        prefix: "${PREFIX:-}"
        credentials:
          write:
            access-key-id-env: WRITE_KEY
            secret-access-key-env: WRITE_SECRET
          read:
            access-key-id-env: READ_KEY
            secret-access-key-env: READ_SECRET
        encryption: none
      - name: standby
        type: kafka
        bootstrap-servers: kafka-b:9092
        topic: orders-${SUFFIX:-copy}
"""


@pytest.mark.mirror_v3("CFG-05", "CFG-06", "CFG-07", "CFG-29", "ENV-15", "ENV-17")
def test_a_whole_file_has_the_same_meaning_as_in_mirror_v3():
    settings = load_text(DUAL, environ={"TOPIC": "orders", **{name: name for name in VARIABLES}})

    (found,) = settings.mirrors
    assert (found.partitions, found.enabled) == ((3,), True)
    assert (found.format, found.compression) == ("parquet", "snappy")
    assert (found.flush.max_bytes, found.flush.daily_at_utc_s) == (2**63 - 1, 86_399)
    files, lake, standby = found.destinations
    assert isinstance(files, FilesystemDestination)
    assert (files.name, files.affects_readiness) == ("files", False)
    assert isinstance(lake, S3Destination)
    assert (lake.endpoint, lake.path_style, lake.prefix) == ("", False, "")
    assert lake.affects_readiness
    assert (lake.write.access_key_id, lake.read.secret_access_key) == ("WRITE_KEY", "READ_SECRET")
    assert isinstance(standby, KafkaDestination)
    assert (standby.topic, standby.timestamp_mode) == ("orders-copy", "destination")


@pytest.mark.mirror_v3("CFG-05")
def test_credentials_by_name_need_their_variables_only_for_a_connection():
    # Mirror-v3 looks at them when it opens the bucket
    text = text_of(mirror(destinations=[BUCKET]))
    settings = load_text(text, environ={"READ_KEY": "r"}, needs_variables=False)
    assert settings.unset_variables == ("WRITE_KEY", "WRITE_SECRET", "READ_SECRET")
    assert len(problems_of(text)) == 4


def test_the_older_shape_has_one_destination_and_directories_of_topics():
    settings = load_text(
        text_of(
            shared_mirror("a", topic="t.a"),
            shared_mirror("b", topic="t.b", destination_name_override="other"),
            destination={**BUCKET, "flush": FLUSH, "format": "ndjson", "compression": "lz4"}
            | {"affects-readiness": False},
        ).replace('"name": "lake",', ""),
        environ={name: name for name in VARIABLES},
    )
    found = [one.destinations[0] for one in settings.mirrors]
    assert [(one.name, one.prefix) for one in found] == [("t.a", "kafka"), ("other", "kafka")]
    assert not any(one.affects_readiness for one in found)


def test_a_compression_is_ignored_with_ndjson_as_in_mirror_v3():
    (found,) = settings_of(mirror(format="ndjson", compression="zstd-3")).mirrors
    assert found.format == "ndjson"


def test_a_compression_is_refused_with_native():
    found = complaints(mirror(format="native", compression="zstd-3"))
    assert found == {"mirrors[0].compression": "is only for format: parquet"}


@pytest.mark.mirror_v3("CFG-06")
def test_a_destination_affects_readiness_by_default():
    for value in (True, False, None):
        (found,) = settings_of(mirror(destinations=[folder(affects_readiness=value)])).mirrors
        assert found.destinations[0].affects_readiness is (value is not False)
    (problem,) = problems_of(text_of(mirror(destinations=[folder(affects_readiness="no")])))
    assert (problem.message, problem.suggestion) == ("must be true or false", "write false")


@pytest.mark.mirror_v3("CFG-21", "CFG-35")
def test_mirrors_of_different_partitions_can_share_a_directory_name():
    def grouped(name, topic, partition):
        source = {"bootstrap-servers": "a:1", "group-id": "g"}
        there = [folder(name=topic)]
        return mirror(name, source=source, topic=topic, partition=partition, destinations=there)

    assert complaints(grouped("x", "t", 0), grouped("y", "t", 1), grouped("z", "u", 0)) == {}


# -- enabled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "environ", "expected"),
    [
        pytest.param("true", {}, True, id="ENA-02-true"),
        pytest.param("True", {}, True, id="ENA-02-True"),
        pytest.param("TRUE", {}, True, id="ENA-02-TRUE"),
        pytest.param("false", {}, False, id="ENA-02-false"),
        pytest.param("False", {}, False, id="ENA-02-False"),
        pytest.param("FALSE", {}, False, id="ENA-02-FALSE"),
        *(
            pytest.param(word, {}, None, id=f"ENA-03-{word}")
            for word in ("yes", "no", "on", "off", "y", "n", "Yes", "OFF")
        ),
        pytest.param("maybe", {}, None, id="ENA-04"),
        pytest.param("${FLAG:-true}", {}, True, id="ENA-05"),
        pytest.param("${FLAG:-false}", {}, False, id="ENA-06"),
        pytest.param("${FLAG:-true}", {"FLAG": "false"}, False, id="ENA-07"),
        pytest.param("${FLAG:-true}", {"FLAG": "yes"}, None, id="ENA-08"),
    ],
)
def test_enabled_is_a_boolean_of_yaml_1_2(written, environ, expected):
    text = text_of(mirror(enabled=0)).replace('"enabled": 0', f'"enabled": {written}')
    if expected is None:
        (problem,) = problems_of(text, environ=environ)
        assert (problem.path, problem.message) == ("mirrors[0].enabled", "must be true or false")
    else:
        assert load_text(text, environ=environ).mirrors[0].enabled is expected


# -- not offered -----------------------------------------------------------------------------------

CACHE = {"cache-v1": {}}
MAIN = {"cache-v1": {}, "cache-v1-main": {}}
NOTIFY = {"api": "kkv-v1", "targets": [{"url": "http://a:1/x"}]}
ON_FLUSH = {"trigger": {"on": "destination-flush"}}
KEYS = {"keys-dir": "/keys", "key-id": "k1"}


def refused(*mirrors, **top):
    """Return the paths at which a file is refused; all problems must be unsupported keys."""
    problems = problems_of(text_of(*mirrors, **top))
    assert {problem.message for problem in problems} == {UNSUPPORTED}
    assert all(problem.suggestion.startswith("remove it") for problem in problems)
    return sorted(problem.path for problem in problems)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        pytest.param({"http-access": CACHE}, ["http-access"], id="CFG-22"),
        pytest.param(
            {"http-access": CACHE, "destinations": [CLUSTER], "flush": None},
            ["http-access"],
            id="CFG-23",
        ),
        # In mirror-v3 this depends on the type of the keys.
        pytest.param({"http-access": CACHE, "compaction": "log"}, ["http-access"], id="CFG-24"),
        pytest.param({"http-access": MAIN}, ["http-access"], id="CFG-25"),
        pytest.param({"http-access": {"cache-v1-main": {}}}, ["http-access"], id="CFG-30"),
        pytest.param({"http-access": CACHE, "name": "raw"}, ["http-access"], id="CFG-33"),
        pytest.param(
            {"notify": NOTIFY, "http-access": MAIN}, ["http-access", "notify"], id="NCF-01"
        ),
        pytest.param(
            {"notify": NOTIFY | {"outcomes": {"4xx": {"retry": False, "final": "skip"}}}},
            ["notify"],
            id="NCF-02",
        ),
        pytest.param({"notify": NOTIFY | ON_FLUSH}, ["notify"], id="NCF-03"),
        pytest.param(
            {"notify": {"targets": [{"path": "/x", "fan-out": "dns-a"}]}}, ["notify"], id="NCF-04"
        ),
        pytest.param({"notify": NOTIFY}, ["notify"], id="NCF-05"),
        pytest.param({"notify": {"targets": []}}, ["notify"], id="NCF-06"),
        pytest.param({"notify": {"targets": [{"url": "::"}]}}, ["notify"], id="NCF-07"),
        pytest.param({"notify": {"targets": [{"url": "ftp://a"}]}}, ["notify"], id="NCF-08"),
        pytest.param(
            {"notify": {"trigger": {"on": "destination-flush", "debounce": {}}}},
            ["notify"],
            id="NCF-09",
        ),
        pytest.param(
            {"notify": {"trigger": {"debounce": {"max-records": 0}}}}, ["notify"], id="NCF-10"
        ),
        pytest.param({"notify": NOTIFY | {"timeout-ms": 0}}, ["notify"], id="NCF-11"),
        pytest.param({"notify": NOTIFY | {"retry": {"max-attempts": 0}}}, ["notify"], id="NCF-12"),
        pytest.param(
            {"notify": NOTIFY, "destinations": [], "flush": None}, ["notify"], id="NCF-13"
        ),
        pytest.param(
            {"notify": NOTIFY | ON_FLUSH, "destinations": [], "flush": None},
            ["notify"],
            id="NCF-15",
        ),
        pytest.param(
            {"notify": NOTIFY, "http-access": MAIN, "destinations": [], "flush": None},
            ["http-access", "notify"],
            id="NCF-16",
        ),
        pytest.param(
            {"notify": NOTIFY, "destinations": [], "format": "parquet", "flush": None},
            ["notify"],
            id="NCF-17",
        ),
        pytest.param({"notify": NOTIFY, "destinations": []}, ["notify"], id="NCF-18"),
        pytest.param(
            {"notify": {"targets": []}, "destinations": [], "flush": None}, ["notify"], id="NCF-19"
        ),
        pytest.param(
            {"notify": NOTIFY | ON_FLUSH, "destinations": [CLUSTER], "flush": None},
            ["notify"],
            id="NCF-20",
        ),
        pytest.param({"notify": NOTIFY | ON_FLUSH}, ["notify"], id="NCF-21"),
    ],
)
def test_an_unsupported_key_is_one_problem_for_any_value(changes, keys):
    assert refused(mirror() | changes) == [f"mirrors[0].{key}" for key in keys]


@pytest.mark.mirror_v3("CFG-26", "NCF-14")
def test_a_mirror_always_needs_a_destination():
    assert complaints(mirror(destinations=[])) == {
        "mirrors[0].destinations": "must list at least one"
    }


@pytest.mark.mirror_v3("CFG-31", "CFG-32")
def test_two_main_caches_are_refused_like_one():
    two = [mirror(name) | {"http-access": MAIN} for name in "ab"]
    two[1]["destinations"] = [folder(root="/elsewhere")]
    assert refused(*two) == ["mirrors[0].http-access", "mirrors[1].http-access"]


@pytest.mark.parametrize(
    "encryption",
    [
        pytest.param(KEYS, id="CFG-37"),
        pytest.param(KEYS | {"key-id": "UPPER"}, id="CFG-38"),
        pytest.param({"keys-dir": "${NOT_SET}", "key-id": "k"}, id="an unset variable below it"),
    ],
)
def test_encryption_with_keys_is_refused_by_name_in_both_shapes(encryption):
    names = {"credentials": {}}
    bucket = BUCKET | names | {"encryption": encryption}
    assert refused(mirror(destinations=[bucket])) == ["mirrors[0].destinations[0].encryption"]
    del bucket["name"]
    shared = bucket | {"flush": FLUSH}
    assert refused(shared_mirror(), destination=shared) == ["destination.encryption"]


@pytest.mark.mirror_v3("CFG-36", "CFG-37")
@pytest.mark.parametrize("encryption", ["none", None])
def test_encryption_none_is_optional(encryption):
    # There it must be
    bucket = BUCKET | {"credentials": {}, "encryption": encryption}
    assert complaints(mirror(destinations=[bucket])) == {}


@pytest.mark.parametrize("key", ["http-access", "notify"])
def test_an_unsupported_key_without_a_value_is_absent(key):
    assert complaints(mirror() | {key: None}) == {}


def test_a_refused_key_hides_no_other_problem():
    text = text_of(
        mirror(topic="not legal", destinations=[], flush=None)
        | {"notify": {"targets": [{"url": "${NOT_SET}"}]}},
        mirror("b", partition=-1),
    )
    assert sorted(problem.path for problem in problems_of(text)) == [
        "mirrors[0].notify",
        "mirrors[0].topic",
        "mirrors[1].partition",
    ]


# -- what it misses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://minio:9000", "http://MINIO:9000/"),
        ("https://minio", "https://minio:443"),
        ("http://minio:80", "http://minio"),
    ],
)
def test_two_spellings_of_an_endpoint_are_one_bucket(one, other):
    def at(name, endpoint):
        there = BUCKET | {"credentials": {}, "endpoint": endpoint}
        return mirror(name, destinations=[there])

    assert list(complaints(at("a", one), at("b", other))) == ["mirrors[1].destinations[0]"]


@pytest.mark.parametrize("there", ["localhost:9092", "LOCALHOST", "127.0.0.1", "kafka.a.:9092"])
def test_two_spellings_of_a_server_are_one_cluster(there):
    here = "kafka.a:9092" if "kafka" in there else "127.0.0.1:9092"
    found = complaints(
        mirror(
            source={"bootstrap-servers": here},
            destinations=[{"type": "kafka", "bootstrap-servers": there}],
            flush=None,
        )
    )
    assert found == {"mirrors[0].destinations[0]": "replicates the topic 'orders' onto itself"}


def test_validate_reports_zero_limits_and_an_invalid_time_of_day():
    zero = dict.fromkeys(FLUSH, 0) | {"daily": {"at-utc": "24:00"}}
    assert set(complaints(mirror(flush=zero)).values()) == {
        "must be 1 or more",
        "must be between 00:00:00 and 23:59:59",
    }


def test_a_thousand_refused_mirrors_are_reported_quickly():
    many = [mirror(f"m{n}", partition=n) | {"notify": NOTIFY} for n in range(1000)]
    assert len(problems_of(json.dumps({"mirrors": many}))) == 1000


@pytest.mark.mirror_v3("CLI-01", "CLI-02")
def test_validate_notes_unset_variables(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text_of(mirror(destinations=[BUCKET])))
    validated = logmirror("validate", "-c", path)
    assert validated.returncode == 0, validated.stderr
    for name in VARIABLES:
        assert (
            f"note: the environment variable {name} is not set; `run` needs it" in validated.stdout
        )
    read = json.loads(logmirror("validate", "-c", path, "--format", "json").stdout)
    assert read["mirrors"] == [{"mirror": "orders", "enabled": True, "destinations": ["lake"]}]
    assert read["unset_variables"] == VARIABLES
    assert logmirror("acls", "print", "-c", path).returncode == 0
    checked = logmirror("validate", "--check", "-c", path)
    assert (checked.returncode, checked.stdout) == (2, "")
    assert checked.stderr.count("is not set") == len(VARIABLES)
