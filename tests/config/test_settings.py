"""A valid file becomes settings with every default filled in, in both shapes of mirror-v3.

Method: whole settings are compared with the file; files of mirror-v3 are as its users write them.
"""

import pickle
from pathlib import Path

import pytest

from kit.runs.configs import (
    ABSENT,
    folder,
    mirror,
    settings_of,
    shared_destination,
    shared_mirror,
    text_of,
)
from logmirror.app.specs import mirror_specs
from logmirror.config.settings import (
    ConfigError,
    FilesystemDestination,
    FlushSettings,
    MirrorSettings,
    Problem,
    Settings,
    SourceSettings,
    SparkSettings,
    config_error,
    load,
    load_text,
)
from logmirror.model import Limits


@pytest.mark.mirror_v3("CFG-04", "ENA-01")
def test_a_minimal_file_gets_every_default():
    settings = settings_of(mirror("orders-copy"))
    assert settings == Settings(
        mirrors=(
            MirrorSettings(
                name="orders-copy",
                enabled=True,
                source=SourceSettings(
                    bootstrap_servers="localhost:9092",
                    properties={},
                ),
                topic="orders",
                partitions=(0,),
                destinations=(FilesystemDestination(name="orders-copy", root=Path("/archive")),),
                format="parquet",
                compression="zstd-1",
                encoding="base64",
                flush=FlushSettings(
                    max_time_ms=60000, max_bytes=1048576, max_offsets=1000, daily_at_utc_s=None
                ),
                chain_start=None,
                path="mirrors[0]",
            ),
        ),
        spark=SparkSettings(master="local[*]", properties={}),
        name="configuration",
    )


def test_every_key_is_read():
    (mirrored,) = settings_of(
        mirror(
            enabled=False,
            source={
                "bootstrap-servers": "PLAINTEXT://a:1 , [::1]:9092,,c",
                "group-id": "team/g 1",
                "properties": {"client.id": "x", "check.crcs": True, "fetch.min.bytes": 1},
            },
            partition=ABSENT,
            partitions=[9, "2-4", "0"],
            destinations=[
                folder(name="one", root="/data/../archive/./x/"),
                folder(name="two, with spaces", root="relative"),
            ],
            format="ndjson",
            encoding="utf8",
            chain_start=77,
            flush={
                "max-time-ms": 1,
                "max-bytes": 2**64 - 1,
                "max-offsets": 2**63,
                "daily": {"at-utc": "23:59:59"},
            },
        )
    ).mirrors
    assert not mirrored.enabled
    assert mirrored.source == SourceSettings(
        bootstrap_servers="PLAINTEXT://a:1,[::1]:9092,c",
        properties={"client.id": "x", "check.crcs": "true", "fetch.min.bytes": "1"},
    )
    assert mirrored.partitions == (0, 2, 3, 4, 9)
    assert mirrored.destinations == (
        FilesystemDestination(name="one", root=Path("/archive/x")),
        FilesystemDestination(name="two, with spaces", root=Path.cwd() / "relative"),
    )
    assert (mirrored.format, mirrored.encoding, mirrored.chain_start) == ("ndjson", "utf8", 77)
    assert mirrored.flush == FlushSettings(
        max_time_ms=1, max_bytes=2**63 - 1, max_offsets=2**63 - 1, daily_at_utc_s=86399
    )


def test_all_partitions_are_none():
    settings = settings_of(mirror(partition=ABSENT, partitions="all", chain_start="earliest"))
    assert settings.mirrors[0].partitions is None
    assert settings.mirrors[0].chain_start == "earliest"


@pytest.mark.mirror_v3("DAY-01", "DAY-02")
@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("00:00:00", 0),
        ("00:00:01", 1),
        ("01:02:03", 3723),
        ("23:59:59", 86399),
        ("00:05", 300),
        ("1:2", 3720),
    ],
)
def test_a_time_of_day_needs_no_quotes(written, seconds):
    text = text_of(mirror(flush={"max-time-ms": 1, "max-bytes": 1, "max-offsets": 1, "daily": 0}))
    settings = load_text(text.replace('"daily": 0', f'"daily": {{at-utc: {written}}}'), environ={})
    assert settings.mirrors[0].flush.daily_at_utc_s == seconds


@pytest.mark.parametrize(
    ("enabled", "environ", "expected"),
    [
        ("True", {}, True),
        ("FALSE", {}, False),
        ("${FLAG:-true}", {}, True),
        ("${FLAG:-false}", {}, False),
        ("${FLAG:-true}", {"FLAG": "false"}, False),
        ("${FLAG:-false}", {"FLAG": ""}, True),
    ],
)
def test_enabled_can_come_from_the_environment(enabled, environ, expected):
    text = text_of(mirror(enabled=0)).replace('"enabled": 0', f'"enabled": {enabled}')
    assert load_text(text, environ=environ).mirrors[0].enabled is expected


def test_an_optional_key_without_a_value_is_absent():
    text = text_of(mirror(format=None, compression=None, destination_name_override=None))
    assert load_text(text, environ={}) == load_text(text_of(mirror()), environ={})


def test_properties_are_texts_as_they_are_written():
    text = """\
mirrors:
  - name: a
    source:
      bootstrap-servers: h:1
      properties: {sasl.password: 0123, a: 1.50, b: 0x10, c: TRUE, d: ${N}, e: "${F}", f: ''}
    topic: t
    partition: 0
    destinations: [{type: filesystem, root: /archive}]
    flush: {max-time-ms: 1, max-bytes: 1, max-offsets: 1}
spark: {properties: {spark.ui.enabled: false, spark.executor.cores: 002}}
"""
    settings = load_text(text, environ={"N": "007", "F": "${N}"})
    assert settings.mirrors[0].source.properties == {
        "sasl.password": "0123",
        "a": "1.50",
        "b": "0x10",
        "c": "TRUE",
        "d": "007",
        "e": "${N}",
        "f": "",
    }
    assert settings.spark.properties == {"spark.ui.enabled": "false", "spark.executor.cores": "002"}


# -- files of mirror-v3 ----------------------------------------------------------------------------


def test_directories_of_a_shared_destination_are_named_after_topics():
    settings = settings_of(
        shared_mirror("a"),
        shared_mirror("b", partition=1),
        shared_mirror("c", topic="t2", destination_name_override="other"),
        destination=shared_destination(format="ndjson"),
    )
    assert [mirrored.destinations for mirrored in settings.mirrors] == [
        (FilesystemDestination(name=name, root=Path("/archive")),)
        for name in ("orders", "orders", "other")
    ]
    assert {mirrored.format for mirrored in settings.mirrors} == {"ndjson"}
    assert {mirrored.flush.max_bytes for mirrored in settings.mirrors} == {1048576}


def test_directories_of_a_mirrors_destinations_are_named_after_the_mirror():
    settings = settings_of(
        mirror("one"), mirror("two", destinations=[folder(name="named")], partition=1)
    )
    assert [mirrored.destinations[0].name for mirrored in settings.mirrors] == ["one", "named"]


# -- loading ---------------------------------------------------------------------------------------


def test_settings_are_picklable_and_have_their_places():
    settings = settings_of(mirror("a"), mirror("b", partition=1))
    copy = pickle.loads(pickle.dumps(settings))
    assert copy == settings
    path = f"{settings.mirrors[1].path}.flush.max-bytes"
    line = text_of(mirror("a"), mirror("b", partition=1)).splitlines()[
        copy.locations.line_of(path) - 1
    ]
    assert '"max-bytes"' in line
    problem = copy.locations.problem(path, "is too small", "write more")
    assert str(problem) == f"{problem.line}:5: {path}: is too small (write more)"


@pytest.mark.mirror_v3("ENV-17")
def test_load_uses_the_environment_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGMIRROR_TEST_TOPIC", "from-outside")
    file = tmp_path / "c.yaml"
    text = text_of(mirror(topic="${LOGMIRROR_TEST_TOPIC}"))
    file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    settings = load(file)
    assert settings.mirrors[0].topic == "from-outside"
    assert settings.name == str(file)
    assert not list(tmp_path.glob("archive*"))


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        (None, None, "the file cannot be read: no such file or directory"),
        (b"x" * (1024 * 1024 + 1), None, "the file is larger than 1048576 bytes"),
        (b"a: 1\nb: caf\xe9\n", (2, 7), "the file is not UTF-8 text"),
        ("a: 1\n".encode("utf-16"), (1, 1), "the file is not UTF-8 text"),
    ],
)
def test_an_unreadable_file_is_one_problem(tmp_path, content, place, message):
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(file)
    line, column = place or (None, None)
    assert caught.value.problems == (Problem("", line, column, message),)
    assert caught.value.facts["file"] == str(file)
    assert caught.value.exit_code == 2


def test_an_error_is_picklable_and_lists_its_problems_in_order():
    first, second = Problem("a", 1, 2, "is wrong"), Problem("b.c", 10, 1, "is odd", "remove it")
    whole = Problem("", None, None, "is empty")
    error = config_error("c.yaml", [second, first, whole, first])
    copy = pickle.loads(pickle.dumps(error))
    assert copy.problems == (whole, first, second)
    assert str(copy).splitlines() == [
        "the configuration has 3 problems [file='c.yaml']",
        "  is empty",
        "  1:2: a: is wrong",
        "  10:1: b.c: is odd (remove it)",
    ]


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("512MiB", 512 << 20),
        ("2 GiB", 2 << 30),
        ("33554432", 32 << 20),
        (1 << 30, 1 << 30),
        ("65536KiB", 64 << 20),
    ],
)
def test_a_memory_budget_is_a_number_of_bytes_or_a_size(written, size_bytes):
    settings = load_text(text_of(mirror("m"), **{"memory-budget": written}))
    assert settings.memory_budget_bytes == size_bytes


def test_limits_reach_the_specs_of_every_destination():
    text = text_of(mirror("m"), limits={"max-record-bytes": "64MiB"})
    settings = load_text(text)
    expected = Limits(max_record_bytes=64 << 20, max_batch_unpacked_bytes=256 << 20)
    assert settings.limits == expected
    assert [spec.limits for one in mirror_specs(settings) for _, spec in one.destinations] == [
        expected
    ]
    assert load_text(text_of(mirror("m"))).limits == Limits()


@pytest.mark.parametrize("written", ["1023KiB", "2GiB", 0, "much"])
def test_a_limit_is_from_1_mib_to_2047_mib(written):
    with pytest.raises(ConfigError) as caught:
        load_text(text_of(mirror("m"), limits={"max-batch-unpacked-bytes": written}))
    (problem,) = caught.value.problems
    assert problem.path == "limits.max-batch-unpacked-bytes"
    assert problem.message.startswith("must be ")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("31MiB", "must be at least 32MiB, which one object needs"),
        (0, "must be at least 32MiB, which one object needs"),
        ("512MB", "must be a number of bytes, or a size such as 512MiB or 2GiB"),
        ("plenty", "must be a number of bytes, or a size such as 512MiB or 2GiB"),
        (True, "must be a number of bytes, or a size such as 512MiB or 2GiB"),
        (-1, "must be a number of bytes, or a size such as 512MiB or 2GiB"),
    ],
)
def test_an_invalid_or_small_memory_budget_is_refused(written, message):
    with pytest.raises(ConfigError) as caught:
        load_text(text_of(mirror("m"), **{"memory-budget": written}))
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == ("memory-budget", message)


def test_on_fatal_is_exit_or_isolate():
    assert load_text(text_of(mirror("m"))).on_fatal == "exit"
    assert load_text(text_of(mirror("m"), **{"on-fatal": "isolate"})).on_fatal == "isolate"
    with pytest.raises(ConfigError) as caught:
        load_text(text_of(mirror("m"), **{"on-fatal": "ignore"}))
    (problem,) = caught.value.problems
    assert problem.path == "on-fatal"


def test_metrics_prefix_is_logmirror_or_mirror_v3():
    assert load_text(text_of(mirror("m"))).metrics_prefix == "logmirror"
    both = load_text(text_of(mirror("m"), **{"metrics-prefix": "mirror_v3"}))
    assert both.metrics_prefix == "mirror_v3"
    with pytest.raises(ConfigError) as caught:
        load_text(text_of(mirror("m"), **{"metrics-prefix": "mirror-v3"}))
    (problem,) = caught.value.problems
    assert problem.path == "metrics-prefix"
