"""A crash at every failpoint of the data path loses, duplicates and changes nothing.

For each point of `failpoints.POINTS` on the path to files, a run ends there by SIGKILL; the files
that it leaves show that it was this point and no other. Each point has its own directories, so that
one clean run over all of them finds every kind of leftover and must finish every archive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.truth import Source
from kit.runs.commands import FORMATS, logmirror, mirror, write_config
from kit.runs.inline_run import InlineRun, run_now
from logmirror.failpoints import POINTS as ALL_POINTS
from logmirror.failpoints import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.xdist_group("e2e-points"), pytest.mark.timeout(900)]

POINTS = [
    p
    for p in ALL_POINTS
    if p.split(".")[0] not in {"head", "hole", "produce", "translate", "compact", "transaction"}
]
"""Those of the path to files; test_copy_kills.py has those of replication to clusters."""

TOPIC = "crash-points"


@dataclass(frozen=True)
class Remains:
    """What a dead run has left in its root, and what it had said."""

    staged: list[bytes]
    """Content of each object that is not published."""

    claims: int
    objects: list[int]
    """Number of names of each published object; two while the staged one is still there."""

    log: str

    @property
    def only_staged(self) -> bool:
        return bool(self.staged) and not self.claims and not self.objects

    @property
    def nothing(self) -> bool:
        return not self.staged and not self.claims and not self.objects

    @property
    def reported(self) -> bool:
        return " flushed " in self.log


def whole(data: bytes) -> bool:
    """Whether a staged object has its end: Parquet's is a footer, the others have none."""
    return len(data) > 1000 and (not data.startswith(b"PAR1") or data.endswith(b"PAR1"))


@dataclass(frozen=True)
class Death:
    """Which time of reaching a point is the last, and what shows it."""

    nth: int
    shows: Callable[[Remains], bool]


DEATHS = {
    "plan.positions": Death(1, lambda r: r.nothing),
    "plan.dispatch": Death(1, lambda r: r.nothing),
    "fetch.answered": Death(1, lambda r: r.nothing),
    "stage.opened": Death(1, lambda r: r.only_staged and not any(r.staged)),
    "stage.written": Death(1, lambda r: r.only_staged and all(r.staged)),
    "stage.finished": Death(1, lambda r: r.only_staged and all(map(whole, r.staged))),
    "claim.created": Death(3, lambda r: r.claims == 3 and r.objects == [1, 1]),
    "publish.linked": Death(3, lambda r: sorted(r.objects) == [1, 1, 2]),
    "publish.done": Death(3, lambda r: r.objects == [1, 1, 1] and not r.reported),
    "commit.received": Death(1, lambda r: bool(r.objects) and not r.reported),
    "commit.done": Death(1, lambda r: bool(r.objects) and r.reported),
}


@dataclass(frozen=True)
class Crashed:
    """All the dead runs, and the clean one after them."""

    source: Source
    remains: dict[str, Remains]
    shown: dict[str, bool]
    """Whether each death showed itself, looked at before the clean run sweeps."""

    roots: dict[str, Path]
    config: Path


@pytest.fixture(scope="module")
def crashed(cli_broker, tmp_path_factory):
    """Every point's run, dead at its point."""
    folder = tmp_path_factory.mktemp("points")
    cli_broker.create_topic(TOPIC, partitions=2)
    for partition in range(2):
        messages = odd_messages(600, seed=partition)
        config = {"batch.num.messages": 20, "linger.ms": 5, "compression.type": "lz4"}
        produce(cli_broker.bootstrap, TOPIC, messages, partition=partition, config=config)
    mirrors, remains, shown, roots = [], {}, {}, {}
    for point in POINTS:
        root = roots[point] = folder / point
        of_point = [mirror_below(root, form, point, cli_broker.bootstrap) for form in FORMATS]
        mirrors += of_point
        config = write_config(folder / f"{point}.json", *of_point)
        remains[point] = die_at(point, config, root, folder)
        shown[point] = DEATHS[point].shows(remains[point])
    source = Source(cli_broker.bootstrap, TOPIC, partitions=range(2))
    return Crashed(source, remains, shown, roots, write_config(folder / "all.json", *mirrors))


def mirror_below(root: Path, form: str, point: str, bootstrap: str) -> dict[str, object]:
    return mirror(
        TOPIC,
        bootstrap,
        root,
        form=form,
        name=f"{form}-of-{point}",
        destinations=[{"type": "filesystem", "root": str(root), "name": form}],
        max_bytes=20_000,
    )


def die_at(point: str, config: Path, root: Path, folder: Path) -> Remains:
    death = DEATHS[point]
    environment = {VARIABLE: f"{point}#{death.nth}"}
    with InlineRun(config, "--until-now", folder=folder, environment=environment) as run:
        assert run.wait() == -9, run.text
        return Remains(
            staged=[path.read_bytes() for path in files_below(root / ".logmirror" / "staged")],
            claims=len(files_below(root / ".logmirror" / "claims")),
            objects=[p.stat().st_nlink for form in FORMATS for p in files_below(root / form)],
            log=run.text,
        )


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def recovered(crashed):
    """The clean run over what all of them left."""
    result = run_now(crashed.config)
    assert result.returncode == 0, result.stderr
    return crashed


@pytest.mark.gate("a process per failpoint; the simulation has them all")
def test_every_failpoint_crashes():
    assert list(DEATHS) == list(POINTS)


@pytest.mark.gate("a process per failpoint; the simulation has them all")
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_a_failpoint_leaves_the_documented_state(crashed, point):
    assert crashed.shown[point], crashed.remains[point]


@pytest.mark.gate("a process per failpoint; the simulation has them all")
@pytest.mark.parametrize("point", POINTS)
def test_the_next_run_finishes_every_copy_exactly(recovered, point):
    root = recovered.roots[point]

    for form in FORMATS:
        assert recovered.source.anomalies(root, form) == [], form
    assert files_below(root / ".logmirror" / "staged") == []


@pytest.mark.gate("a process per failpoint; the simulation has them all")
def test_verify_accepts_each_finished_archive(recovered):
    result = logmirror("verify", "--deep", "--against-source", "-c", recovered.config)

    assert result.returncode == 0, result.stdout
