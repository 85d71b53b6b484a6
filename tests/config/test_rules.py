"""All problems of a file are reported at once, each one once, with its place.

Method: a valid file is changed in one place and all problems are compared, so that neither a
missing nor a superfluous problem can pass. Then files with many errors, and a random search over
files a few edits away from a valid one: each gives settings or problems.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.configs import (
    ABSENT,
    complaints,
    folder,
    mirror,
    problems_of,
    settings_of,
    shared_destination,
    shared_mirror,
    text_of,
)

HOLDS_NO_SLASH = "must not begin with a dot or contain a slash: it is a directory name"
RANGES = "has a range that is not ascending within 0..2147483647"


def flush(**changes):
    return {"max-time-ms": 1, "max-bytes": 1, "max-offsets": 1} | {
        key.replace("_", "-"): value for key, value in changes.items()
    }


def source(**changes):
    return {"bootstrap-servers": "a:9092"} | {
        key.replace("_", "-"): value for key, value in changes.items()
    }


@pytest.mark.mirror_v3("CFG-03", "CFG-10", "CFG-14")
@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"name": ABSENT}, ".name", "is required"),
        ({"name": ""}, ".name", "must not be empty"),
        (
            {"source": source(bootstrap_servers="")},
            ".source.bootstrap-servers",
            "must not be empty",
        ),
        ({"destinations": [folder(root="")]}, ".destinations[0].root", "must not be empty"),
        ({"name": 5}, ".name", "must be text"),
        ({"name": "a/b"}, ".name", HOLDS_NO_SLASH),
        ({"name": ".."}, ".name", HOLDS_NO_SLASH),
        ({"name": ".hidden"}, ".name", HOLDS_NO_SLASH),
        ({"name": "a\\b"}, ".name", HOLDS_NO_SLASH),
        ({"name": " a"}, ".name", "must be printable, without leading or trailing spaces"),
        ({"name": "a\nb"}, ".name", "must be printable, without leading or trailing spaces"),
        ({"name": "ä" * 101}, ".name", "must not be longer than 200 bytes"),
        ({"topic": ABSENT}, ".topic", "is required"),
        ({"topic": "a b"}, ".topic", None),
        ({"topic": ".."}, ".topic", None),
        ({"topic": "x" * 250}, ".topic", None),
        ({"topic": "ünïcode"}, ".topic", None),
        ({"enabled": "yes"}, ".enabled", "must be true or false"),
        ({"enabled": 1}, ".enabled", "must be true or false"),
        ({"partition": ABSENT}, ".partition", "is required"),
        ({"partition": -1}, ".partition", "must be 0 or more"),
        ({"partition": 2**31}, ".partition", "must be 2147483647 or less"),
        ({"partition": "0"}, ".partition", "must be a whole number"),
        ({"partition": 0.0}, ".partition", "must be a whole number"),
        ({"partition": True}, ".partition", "must be a whole number"),
        ({"partitions": "all"}, ".partitions", "partition is set too"),
        ({"source": ABSENT}, ".source", "is required"),
        ({"source": "localhost:9092"}, ".source", "must be a mapping"),
        ({"source": {}}, ".source.bootstrap-servers", "is required"),
        ({"source": source(bootstrap_servers="a:0")}, ".source.bootstrap-servers", None),
        ({"source": source(bootstrap_servers="a:70000")}, ".source.bootstrap-servers", None),
        ({"source": source(bootstrap_servers="a:x")}, ".source.bootstrap-servers", None),
        ({"source": source(bootstrap_servers="a b:1")}, ".source.bootstrap-servers", None),
        ({"source": source(bootstrap_servers="kafk\u0430:1")}, ".source.bootstrap-servers", None),
        ({"source": source(bootstrap_servers=" , ")}, ".source.bootstrap-servers", None),
        ({"source": source(group_id="a\tb")}, ".source.group-id", None),
        ({"source": source(properties=["a"])}, ".source.properties", "must be a mapping"),
        ({"source": source(properties={"a": []})}, ".source.properties.a", "must be text"),
        ({"source": source(properties={"a": None})}, ".source.properties.a", "must be text"),
        (
            {"source": source(properties={"group.id": "x"})},
            ".source.properties.group.id",
            "has no effect: logmirror uses no consumer group",
        ),
        ({"destinations": ABSENT}, ".destinations", "is required"),
        ({"destinations": []}, ".destinations", "must list at least one"),
        ({"destinations": {}}, ".destinations", "must be a list"),
        ({"destinations": ["/a"]}, ".destinations[0]", "must be a mapping"),
        ({"destinations": [folder(root=ABSENT)]}, ".destinations[0].root", "is required"),
        ({"destinations": [folder(type=ABSENT)]}, ".destinations[0].type", "is required"),
        (
            {"destinations": [folder(type="file")]},
            ".destinations[0].type",
            "must be filesystem, kafka or s3",
        ),
        ({"destinations": [folder(root="s3://b/p")]}, ".destinations[0].root", None),
        ({"destinations": [folder(root="~/archive")]}, ".destinations[0].root", None),
        ({"destinations": [folder(root="a\0b")]}, ".destinations[0].root", None),
        ({"destinations": [folder(name="../up")]}, ".destinations[0].name", HOLDS_NO_SLASH),
        ({"destination_name_override": "x"}, ".destination-name-override", None),
        ({"flush": ABSENT}, ".flush", "is required"),
        ({"flush": flush(max_bytes=0)}, ".flush.max-bytes", "must be 1 or more"),
        ({"flush": flush(max_time_ms="10m")}, ".flush.max-time-ms", "must be a whole number"),
        ({"flush": flush(max_offsets=2**64)}, ".flush.max-offsets", None),
        ({"flush": flush(daily={})}, ".flush.daily.at-utc", "is required"),
        ({"flush": flush(daily={"at-utc": 750})}, ".flush.daily.at-utc", "must be text"),
        ({"format": "parqet"}, ".format", "must be parquet, native or ndjson"),
        ({"format": "native", "compression": "lz4"}, ".compression", "is only for format: parquet"),
        ({"encoding": "utf8"}, ".encoding", "is only for format: ndjson"),
        ({"compression": "gzip"}, ".compression", None),
        ({"chain_start": -1}, ".chain-start", None),
        ({"chain_start": "latest"}, ".chain-start", None),
        ({"chain_start": True}, ".chain-start", None),
        ({"chain_start": 2**63}, ".chain-start", None),
        ({"colour": "red"}, ".colour", "unknown key"),
    ],
)
def test_one_error_is_one_problem_with_its_place(changes, path, message):
    found = complaints(mirror(**changes))
    assert list(found) == [f"mirrors[0]{path}"]
    if message is not None:
        assert found[f"mirrors[0]{path}"] == message


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        ([], 'must be all, or a list of numbers and ranges such as [0, 1, "4-7"]'),
        ("ALL", 'must be all, or a list of numbers and ranges such as [0, 1, "4-7"]'),
        (3, 'must be all, or a list of numbers and ranges such as [0, 1, "4-7"]'),
        ([0, "x"], 'must hold only numbers and ranges such as 3 and "4-7"'),
        ([True], 'must hold only numbers and ranges such as 3 and "4-7"'),
        ([-1], 'must hold only numbers and ranges such as 3 and "4-7"'),
        ([[0]], 'must hold only numbers and ranges such as 3 and "4-7"'),
        (["7-4"], RANGES),
        ([2**31], RANGES),
        (["0-2147483647"], "names more than 100000 partitions"),
        ([1, "0-4"], "has a duplicate partition"),
    ],
)
def test_an_invalid_list_of_partitions_is_refused(partitions, message):
    found = complaints(mirror(partition=ABSENT, partitions=partitions))
    assert found == {"mirrors[0].partitions": message}


@pytest.mark.mirror_v3("DAY-03")
@pytest.mark.parametrize("time", ["24:00", "00:60", "00:00:60", "99:99:99"])
def test_a_time_of_day_out_of_range_is_refused(time):
    found = complaints(mirror(flush=flush(daily={"at-utc": time})))
    assert found == {"mirrors[0].flush.daily.at-utc": "must be between 00:00:00 and 23:59:59"}


@pytest.mark.mirror_v3("DAY-04")
@pytest.mark.parametrize("time", ["", "abc", "12", "1:2:3:4", "12:", "-1:00", "12:00 ", "١٢:00"])
def test_a_malformed_time_of_day_is_refused(time):
    found = complaints(mirror(flush=flush(daily={"at-utc": time})))
    assert found == {"mirrors[0].flush.daily.at-utc": "must be HH:MM or HH:MM:SS"}


# -- suggestions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "suggestion"),
    [
        ({"destination": []}, "did you mean destinations?"),
        ({"partitons": "all"}, "did you mean partitions?"),
        ({"chainStart": 1}, "did you mean chain-start?"),
        ({"max-bytes": 1}, "it belongs below mirrors.flush"),
        ({"bootstrap_servers": "a:1"}, ""),
        ({"bootstrap-servers": "a:1"}, "it belongs below mirrors.source"),
        ({"spark": {}}, "it belongs at the top level"),
        ({"format": "parqet"}, "did you mean parquet?"),
        ({"format": "json"}, "did you mean ndjson?"),
        ({"enabled": "off"}, "write false"),
        ({"name": 7}, "put it in quotes"),
        ({"partition": "all"}, "write partitions: all"),
        ({"partition": ABSENT}, "write partition: 0 or partitions: all"),
        ({"partition": ABSENT, "partitions": 4}, "write partition: 4 or partitions: [4]"),
        ({"flush": flush(max_time_ms="10m")}, "write 600000"),
        ({"flush": flush(max_bytes="10m")}, "write 10000000"),
        ({"flush": flush(max_bytes="64 MiB")}, "write 67108864"),
        ({"flush": flush(max_bytes="64KiB")}, "write 65536"),
        ({"flush": flush(max_bytes="64 parsecs")}, ""),
        ({"flush": flush(max_bytes="64")}, "remove the quotes"),
        ({"flush": flush(max_offset=1)}, "did you mean max-offsets?"),
        ({"until": {"tme": 1}}, "did you mean time?"),
        ({"groups": {"source-alias": "a", "exlude": []}}, "did you mean exclude?"),
        ({"source": source(bootstrap_server="x")}, "did you mean bootstrap-servers?"),
    ],
)
def test_a_problem_suggests_what_to_write_instead(changes, suggestion):
    changed = {key: value for key, value in (mirror() | changes).items() if value is not ABSENT}
    (problem,) = problems_of(text_of(changed))
    assert problem.suggestion == suggestion


# -- several mirrors -------------------------------------------------------------------------------


@pytest.mark.mirror_v3("CFG-20")
def test_two_mirrors_cannot_have_one_name():
    assert complaints(mirror("a"), mirror("b"), mirror("a", partition=1)) == {
        "mirrors[2].name": "mirrors[0] also has the name 'a'"
    }


@pytest.mark.mirror_v3("CFG-27", "CFG-28")
def test_several_destinations_need_names():
    two = [folder(root="/a"), folder(root="/b")]
    assert complaints(mirror(destinations=two)) == {
        f"mirrors[0].destinations[{i}].name": "is required if a mirror has several destinations"
        for i in range(2)
    }
    same = [folder(name="x", root="/a"), folder(name="x", root="/b")]
    assert complaints(mirror(destinations=same)) == {
        "mirrors[0].destinations[1].name": "mirrors[0].destinations[0] also has the name 'x'"
    }


@pytest.mark.mirror_v3("CFG-34")
@pytest.mark.parametrize(
    ("one", "other", "partition"),
    [
        ({"partition": 3}, {"partition": 3}, 3),
        ({"partitions": "all"}, {"partition": 3}, 3),
        ({"partition": 3}, {"partitions": "all"}, 3),
        ({"partitions": "all"}, {"partitions": "all"}, 0),
        ({"partitions": [0, "5-9"]}, {"partitions": ["3-5"]}, 5),
        ({"partition": 3}, {"partition": 4}, None),
        ({"partitions": [0, 1]}, {"partitions": [2, 3]}, None),
    ],
)
@pytest.mark.parametrize("root", ["/data/x", "/data/./x", "/data/y/../x", "/data//x/"])
def test_two_mirrors_cannot_write_one_directory(one, other, partition, root):
    one, other = ({"partition": ABSENT} | keys for keys in (one, other))
    found = complaints(
        mirror("a", destinations=[folder(name="t", root="/data/x")], **one),
        mirror("b", destinations=[folder(name="t", root=root)], **other),
    )
    expected = f"mirrors 'a' and 'b' both write '/data/x/t/{partition}'"
    assert found == ({} if partition is None else {"mirrors[1].destinations[0]": expected})


def test_a_symbolic_link_to_a_directory_is_the_same_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    found = complaints(
        mirror("a", destinations=[folder(name="t", root=str(tmp_path / "real"))]),
        mirror("b", destinations=[folder(name="t", root=str(tmp_path / "link"))]),
    )
    assert list(found) == ["mirrors[1].destinations[0]"]


def test_a_directory_inside_a_partition_directory_is_refused():
    found = complaints(
        mirror("a", destinations=[folder(name="t", root="/data")], partition=3),
        mirror("b", destinations=[folder(name="3", root="/data/t")]),
        mirror("c", destinations=[folder(name="4", root="/data/t")]),
        mirror("d", destinations=[folder(name="u", root="/data/t/3/deep")]),
    )
    assert found == {
        "mirrors[1].destinations[0]": "'/data/t/3' is inside '/data/t/3' of 'a'",
        "mirrors[3].destinations[0]": "'/data/t/3/deep/u' is inside '/data/t/3' of 'a'",
    }


@pytest.mark.mirror_v3("CFG-35")
def test_a_group_id_is_ignored():
    """mirror-v3 refuses two mirrors with one group, topic and partition."""

    def mirrors(**changes):
        destinations = [[folder(root=root)] for root in ("/a", "/b")]
        both = [
            mirror(name, source=source(**changes), destinations=at)
            for name, at in zip("xy", destinations, strict=True)
        ]
        return settings_of(*both).mirrors

    assert mirrors(group_id="g") == mirrors()


def test_a_shared_destination_excludes_destinations_of_mirrors():
    found = complaints(
        mirror("a", format="native"),
        shared_mirror("b", partition=1),
        destination=shared_destination(format="native", compression="lz4"),
    )
    there = "the file has one destination for all mirrors"
    assert found == {
        "mirrors[0].destinations": there,
        "mirrors[0].format": there,
        "mirrors[0].flush": there,
        "destination.compression": "is only for format: parquet",
    }


def test_mirrors_of_one_topic_share_its_directory_only_with_different_partitions():
    destination = shared_destination()
    assert (
        complaints(shared_mirror("a"), shared_mirror("b", partition=1), destination=destination)
        == {}
    )
    assert complaints(shared_mirror("a"), shared_mirror("b"), destination=destination) == {
        "mirrors[1]": "mirrors 'a' and 'b' both write '/archive/orders/0'"
    }


# -- not supported ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["topics"],
)
def test_an_unsupported_key_is_refused_by_name(key):
    found = complaints(mirror() | {key: {"any": ["thing"]}})
    assert found == {f"mirrors[0].{key}": "is not supported by this version"}


@pytest.mark.parametrize("key", ["encryption"])
def test_an_unsupported_key_of_a_destination_is_refused_by_name(key):
    found = complaints(mirror(destinations=[folder() | {key: "none"}]))
    assert found == {f"mirrors[0].destinations[0].{key}": "is not supported by this version"}


# -- the file as a whole ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("[]", "", "the file must be a mapping with the key mirrors"),
        ("mirrors", "", "the file must be a mapping with the key mirrors"),
        ("{}", "mirrors", "is required"),
        ("mirrors:", "mirrors", "is required"),
        ("mirrors: []", "mirrors", "must list at least one"),
        ("mirrors: {}", "mirrors", "must be a list"),
        ("mirrors: [1]", "mirrors[0]", "must be a mapping"),
    ],
)
def test_a_file_must_have_mirrors(text, path, message):
    assert [(p.path, p.message) for p in problems_of(text)] == [(path, message)]


def test_spark_is_checked_too():
    found = complaints(
        mirror(),
        spark={
            "master": "mesos://x",
            "properties": {"driver.memory": "1g", "spark.master": "yarn"},
        },
    )
    assert found == {
        "spark.master": "must be local, local[N], local[*], spark://host:port, yarn or k8s://...",
        "spark.properties.driver.memory": "must begin with spark.",
        "spark.properties.spark.master": "the file has a key for this",
    }


@pytest.mark.parametrize(
    "master",
    ["local", "local[2]", "local[*]", "local[*,4]", "spark://h:7077", "yarn", "k8s://https://h:1"],
)
def test_valid_spark_masters_are_accepted(master):
    assert settings_of(mirror(), spark={"master": master}).spark.master == master


def test_all_problems_are_reported_in_the_order_of_the_file():
    text = """\
mirrors:
  - name: a
    sourc: {}
    topic: "not legal"
    partition: ${UNSET}
    destinations:
      - {type: s3, bucket: b}
      - {type: filesystem, root: /data, name: t}
      - {type: filesystem, root: 5, name: t}
    flush: {max-time-ms: 10s, max-bytes: 0}
  - name: a
    source: {bootstrap-servers: "h:1", properties: {sasl.passwort: x}}
    topic: b
    partition: 0
    partition: 1
    destinations:
      - {type: filesystem, root: /data/., name: t}
    notify: {}
    flush: {max-time-ms: 1, max-bytes: 1, max-offsets: 1}
"""

    def validate(properties):
        return [(name, "unknown", "sasl.password") for name in properties]

    assert [(p.line, p.path) for p in problems_of(text, check_properties=validate)] == [
        (2, "mirrors[0].source"),
        (3, "mirrors[0].sourc"),
        (4, "mirrors[0].topic"),
        (5, "mirrors[0].partition"),
        (7, "mirrors[0].destinations[0].name"),
        (7, "mirrors[0].destinations[0].bucket"),
        (9, "mirrors[0].destinations[2].root"),
        (9, "mirrors[0].destinations[2].name"),
        (10, "mirrors[0].flush.max-offsets"),
        (10, "mirrors[0].flush.max-time-ms"),
        (10, "mirrors[0].flush.max-bytes"),
        (11, "mirrors[1].name"),
        (12, "mirrors[1].source.properties.sasl.passwort"),
        (15, "mirrors[1].partition"),
        (18, "mirrors[1].notify"),
    ]


def test_a_value_with_an_unset_variable_has_no_further_problems():
    text = text_of(mirror(source=source(properties={"sasl.password": "${UNSET}"})))

    def validate(properties):
        assert properties == {}
        return [("sasl.password", "is missing", "")]

    (problem,) = problems_of(text, check_properties=validate)
    assert problem.message == "the environment variable UNSET is not set"


def test_a_value_with_a_tag_has_no_further_problems():
    text = text_of(mirror(partition=0, topic=1)).replace('"topic": 1', '"topic": !name {a: b}')
    (problem,) = problems_of(text)
    assert (problem.path, problem.message) == (
        "mirrors[0].topic",
        "tags (`!...`) are not supported",
    )


_VALID = text_of(
    mirror("a", source=source(properties={"k": "${X:-v}"}), flush=flush(daily={"at-utc": "1:02"})),
    mirror("b", partition=ABSENT, partitions=[0, "2-3"], chain_start=5, format="native"),
    spark={"master": "local"},
)
_EDITS = st.tuples(
    st.integers(0, len(_VALID)),
    st.integers(0, 3),
    st.text("${}[]:,\"'\n\t #&*!|>-?0aé~\\", max_size=3),
)


@given(st.lists(_EDITS, min_size=1, max_size=3))
def test_a_mutated_file_gives_settings_or_problems(edits):
    text = _VALID
    for at, cut, put in edits:
        text = text[:at] + put + text[at + cut :]
    # Fails by itself on anything but settings or a ConfigError with problems.
    problems = problems_of(text)
    lines = range(1, text.count("\n") + 3)
    assert all(problem.line is None or problem.line in lines for problem in problems)
