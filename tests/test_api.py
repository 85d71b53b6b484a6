"""The front door: what `import logmirror` offers, how cheap it is, what it reports.

Method: names and types are read from the package; the import runs in a process of its own, and its
modules are listed. Functions are called on archives in a temporary folder, without a cluster, or
with one that does not respond. `tests/docs/test_python_page.py` runs the page's examples with
Spark.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import logmirror
from kit.servers.machine import HOST, free_ports
from logmirror import reports
from logmirror.app import components

PACKAGE = Path(logmirror.__file__).parent


def values(root: Path, server: str = "127.0.0.1:9") -> dict[str, object]:
    return {
        "mirrors": [
            {
                "name": name,
                "source": {"bootstrap-servers": server},
                "topic": name,
                "partition": 0,
                "destinations": [{"type": "filesystem", "root": str(root / name)}],
                "format": "parquet",
                "flush": {"max-time-ms": 1, "max-bytes": 1, "max-offsets": 1},
            }
            for name in ("orders", "users")
        ]
    }


def test_all_names_exist_are_sorted_and_documented():
    names = logmirror.__all__

    assert names == sorted(names)
    assert [name for name in names if not inspect.getdoc(getattr(logmirror, name))] == []
    public = {name for name in vars(logmirror) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(logmirror, name))}
    assert public - modules == set(names)


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_no_function_is_hidden_by_a_submodule_of_its_name():
    submodules = {path.stem for path in PACKAGE.iterdir()}

    assert submodules.intersection(logmirror.__all__) == set()


def test_importing_it_loads_no_engine_no_kernel_and_no_library_of_clients():
    code = "import sys, logmirror; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded.isdisjoint({"pyspark", "numba", "numpy", "pyarrow", "kafka", "boto3", "pydantic"})


@pytest.mark.parametrize(
    "report",
    [
        reports.Acl,
        reports.CheckReport,
        reports.ClusterAcls,
        reports.CompactReport,
        reports.Event,
        reports.MirrorProgress,
        reports.PartitionStatus,
        reports.Problem,
        reports.RunProgress,
        reports.VerifyReport,
    ],
)
def test_reports_are_frozen_and_every_field_is_documented(report):
    source = inspect.getsource(report)
    lines = [line.strip() for line in source.splitlines()]

    assert report.__dataclass_params__.frozen
    for field in dataclasses.fields(report):
        at = next(n for n, line in enumerate(lines) if line.startswith(f"{field.name}:"))
        assert lines[at + 1].startswith('"""'), field.name


def test_a_configuration_is_loaded_from_a_file_a_text_and_values(tmp_path):
    text = str(values(tmp_path)).replace("'", '"')
    (tmp_path / "mirror.yaml").write_text(text)

    found = [
        logmirror.load(tmp_path / "mirror.yaml"),
        logmirror.load(text=text),
        logmirror.load(values=values(tmp_path)),
    ]

    assert [[mirror.name for mirror in one.mirrors] for one in found] == [["orders", "users"]] * 3
    assert found[1].mirrors == found[2].mirrors


def test_mirrors_are_chosen_by_name(tmp_path):
    (mirror,) = logmirror.load(values=values(tmp_path), mirrors=["users"]).mirrors

    assert mirror.name == "users"
    with pytest.raises(logmirror.UsageError, match="no such mirror"):
        logmirror.load(values=values(tmp_path), mirrors=["user"])


@pytest.mark.parametrize("given", [{}, {"path": "a.yaml", "text": "b"}], ids=["none", "two"])
def test_exactly_one_configuration_is_required(given):
    with pytest.raises(logmirror.UsageError, match="one of path, text and values"):
        logmirror.load(**given)


def test_an_invalid_configuration_lists_every_problem_with_its_line(tmp_path):
    broken = values(tmp_path)
    for mirror in broken["mirrors"]:
        mirror["topix"] = mirror.pop("topic")

    with pytest.raises(logmirror.ConfigError) as caught:
        logmirror.load(values=broken)

    paths = [problem.path for problem in caught.value.problems]
    assert {"mirrors[0].topix", "mirrors[1].topix"} <= set(paths)
    assert all(problem.line == 1 for problem in caught.value.problems)


def test_properties_of_a_source_are_checked(tmp_path):
    given = values(tmp_path)
    given["mirrors"][0]["source"]["properties"] = {"sasl.mechanizm": "PLAIN"}

    with pytest.raises(logmirror.ConfigError, match=r"sasl\.mechanizm"):
        logmirror.load(values=given)


def test_a_source_that_does_not_respond_is_a_row_of_status(tmp_path, monkeypatch):
    monkeypatch.setattr(components, "COMMAND_BUDGET_MS", 200)
    monkeypatch.setattr("logmirror.app.status.COMMAND_BUDGET_MS", 200)
    away = f"{HOST}:{free_ports(1)[0]}"

    rows = logmirror.status(logmirror.load(values=values(tmp_path, away)))

    assert [(row.mirror, row.partition, row.position, row.lag) for row in rows] == [
        ("orders", 0, None, None),
        ("users", 0, None, None),
    ]
    assert {type(row.error) for row in rows} == {logmirror.UnavailableError}


def test_an_empty_archive_is_verified_and_a_gap_is_a_problem(tmp_path):
    settings = logmirror.load(values=values(tmp_path))
    folder = tmp_path / "orders" / "orders" / "0"
    folder.mkdir(parents=True)
    for first, last in [(0, 4), (7, 9)]:
        (folder / f"{first:020d}-{last:020d}.parquet").write_bytes(b"")

    orders, users = logmirror.verify(settings)

    assert (users.ok, users.objects, users.next_offset) == (True, 0, 0)
    assert not orders.ok
    assert [problem.kind for problem in orders.problems] == ["corruption"]


def test_without_an_archive_nothing_can_be_compacted():
    settings = logmirror.load(
        values={
            "mirrors": [
                {
                    "name": "m",
                    "source": {"bootstrap-servers": "a:9092"},
                    "topic": "t",
                    "partition": 0,
                    "destinations": [{"type": "kafka", "bootstrap-servers": "b:9092"}],
                }
            ]
        }
    )

    with pytest.raises(logmirror.UsageError, match="no archive"):
        logmirror.compact(settings)


def test_events_reach_the_callback_with_their_facts_and_only_meanwhile():
    import logging  # noqa: PLC0415  # this test alone logs

    from logmirror.monitoring.logs import reporting  # noqa: PLC0415  # this test alone

    log, seen = logging.getLogger("logmirror.mirror"), []
    with reporting(seen.append):
        log.info("flushed", extra={"facts": {"mirror": "m", "from": 0}})
        log.debug("heartbeat", extra={"facts": {"mirror": "m"}})
    log.info("flushed", extra={"facts": {"mirror": "n"}})

    (event,) = seen
    assert (event.level, event.name, dict(event.facts)) == (
        "INFO",
        "flushed",
        {"mirror": "m", "from": 0},
    )
    assert isinstance(event, logmirror.Event)


def test_an_exception_of_the_callback_does_not_reach_the_mirror(capsys):
    import logging  # noqa: PLC0415  # this test alone logs

    from logmirror.monitoring.logs import reporting  # noqa: PLC0415  # this test alone

    def fail(_event: logmirror.Event) -> None:
        raise RuntimeError("broken callback")

    with reporting(fail):
        logging.getLogger("logmirror.mirror").info("flushed", extra={"facts": {}})

    assert "broken callback" in capsys.readouterr().err
