"""`logmirror verify`: names, content, and comparison with the source. Creates nothing anywhere."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from logmirror.app.components import Clients
from logmirror.app.specs import mirror_specs
from logmirror.archive.group_snapshots import Snapshots
from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import CorruptionError, LogmirrorError, UnavailableError
from logmirror.mirror.ports import ArchiveSpec, FlowId, KafkaSpec
from logmirror.mirror.source_views import MirrorSpec, flows_of, source_views
from logmirror.reports import Problem, VerifyReport
from logmirror.source.compare import chunks
from logmirror.source.partition import KafkaSource
from logmirror.stores.opening import open_store
from logmirror.to_kafka.idempotence import target
from logmirror.to_kafka.translate_progress import ProgressReader, current
from logmirror.verification import archive as archives
from logmirror.verification import cluster as copies
from logmirror.verification.archive import FlowReport
from logmirror.verification.snapshot import compare_snapshot
from logmirror.verification.source import SourceSide, compare_with_source
from logmirror.wire.decode import RecordDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from logmirror.archive.chain import ArchiveObject
    from logmirror.cluster.client import ClusterClient
    from logmirror.config.settings import Settings
    from logmirror.mirror.ports import SourceView
    from logmirror.model import TopicPartition
    from logmirror.stores.base import BlobStore

_LISTINGS_MAX: Final = 20
"""Attempts to read the ends of a replica that a running mirror extends meanwhile."""


def verify(
    settings: Settings,
    *,
    deep: bool = False,
    against_source: bool = False,
    on_object: Callable[[], None] = lambda: None,
    on_report: Callable[[VerifyReport], None] = lambda _: None,
) -> list[VerifyReport]:
    """Verify the replicas of every enabled mirror; see `logmirror.verify`.

    Partitions are those of the configuration. With `partitions: all` they are those that the
    destination holds, or with `against_source` those of the source.
    """
    reports: list[VerifyReport] = []
    clients = Clients()
    try:
        for spec in mirror_specs(settings):
            found = _verify_mirror(
                spec, clients, deep=deep, against_source=against_source, on_object=on_object
            )
            for each in found:
                reports.append(_report(each))
                on_report(reports[-1])
    finally:
        clients.close()
    return reports


@dataclass(frozen=True, slots=True)
class _Proof:
    """One mirror's verification: what was requested, and the source's topic."""

    spec: MirrorSpec
    clients: Clients
    deep: bool
    against_source: bool
    on_object: Callable[[], None]
    topic_id: bytes | None = None
    compacted: bool = False

    def source(self, partition: TopicPartition) -> KafkaSource:
        """The source's side of a comparison."""
        return KafkaSource(self.clients(self.spec.source), partition, topic_id=self.topic_id)

    def side(
        self,
        archive: ArchiveSpec,
        store: BlobStore,
        flow: FlowId,
        views: Mapping[TopicPartition, SourceView],
    ) -> SourceSide | None:
        """Return what an archive is compared with; None without `against_source`."""
        if not self.against_source:
            return None
        return SourceSide(
            archive=archive,
            store=store,
            folder=flow.folder,
            source=self.source(flow.source),
            decoder=RecordDecoder(limits=archive.limits),
            view=views[flow.source],
            compacted=self.compacted,
        )

    def views(self, partitions: set[TopicPartition]) -> dict[TopicPartition, SourceView]:
        """Return the source's ends, read after the replicas' ends: a mirror may be running."""
        if not self.against_source:
            return {}
        return source_views(self.clients(self.spec.source), partitions, self.topic_id)


def _verify_mirror(
    spec: MirrorSpec,
    clients: Clients,
    *,
    deep: bool,
    against_source: bool,
    on_object: Callable[[], None],
) -> Iterator[FlowReport]:
    topic_id, compacted, numbers = None, False, spec.partitions
    if against_source:
        topic = clients(spec.source).topic(spec.topic)
        numbers, topic_id = spec.partitions or tuple(sorted(topic.partitions)), topic.topic_id
        configs = clients(spec.source).describe_topic_configs(spec.topic)
        compacted = "compact" in (configs.get("cleanup.policy") or "")
    proof = _Proof(
        spec, clients, deep or against_source, against_source, on_object, topic_id, compacted
    )
    for name, written in spec.destinations:
        if isinstance(written, KafkaSpec):
            held = numbers or tuple(clients(written.cluster).topic(written.topic).partitions)
            flows = [flow for flow, of in flows_of(spec, held) if of is written]
            yield from _verify_cluster(proof, written, flows)
        else:
            held = numbers or tuple(_held_partitions(open_store(written.location, "verify"), name))
            flows = [flow for flow, of in flows_of(spec, held) if of is written]
            yield from _verify_archive(proof, name, written, flows)


def _verify_archive(
    proof: _Proof, name: str, archive: ArchiveSpec, flows: list[FlowId]
) -> Iterator[FlowReport]:

    store = open_store(archive.location, "verify")
    is_log = archive.compaction is not None
    named = [
        archives.verify_names(
            store,
            flow,
            archive.extension,
            chain_start=proof.spec.chain_start,
            snapshots=is_log,
        )
        for flow in flows
    ]
    spec = proof.spec
    if not named:  # an archive of groups without a record
        flow = FlowId(mirror=spec.name, destination=name, topic=spec.topic, partition=0)
        found_in, alone = FlowReport(flow=flow), True
    else:
        found_in, alone = named[0][0], False
    waiting = deque(named)
    try:
        archives.verify_group_offsets(found_in, Snapshots(store, name, spec.name), deep=proof.deep)
        if alone and found_in.group_snapshots is not None:
            yield found_in
        views = proof.views({flow.source for flow in flows})
        while waiting:
            if proof.deep:
                report, objects = waiting[0]
                side = proof.side(archive, store, report.flow, views)
                _read_objects(proof, archive, store, report, objects, side)
            yield waiting.popleft()[0]
    except LogmirrorError:  # what was found before it is not lost
        yield from (report for report, _ in waiting if report.problems)
        raise


def _read_objects(  # noqa: PLR0913, PLR0917  # an archive, one flow of it, and the other side
    proof: _Proof,
    archive: ArchiveSpec,
    store: BlobStore,
    report: FlowReport,
    objects: tuple[ArchiveObject, ...],
    side: SourceSide | None,
) -> None:
    found = archives.verify_content(
        report,
        objects,
        store,
        archive,
        proof.on_object,
        ask_source=proof.against_source,
        compacted=proof.compacted,
    )
    for checked in found:
        if side is None:
            continue
        if archive.compaction is None:
            compare_with_source(report, checked, side)
        elif checked.obj == objects[-1]:
            compare_snapshot(report, checked, side)
        else:  # what they lack has been superseded, and the source need not show it
            report.gone += 1


def _verify_cluster(proof: _Proof, written: KafkaSpec, flows: list[FlowId]) -> Iterator[FlowReport]:

    client = proof.clients(written.cluster)
    of = {flow: target(written, flow) for flow in flows}
    if written.offsets == "translate":
        yield from _verify_translated(proof, written, of)
        return
    starts = client.list_offsets(of.values(), EARLIEST)
    ends = client.log_ends(of.values())
    views = proof.views({flow.source for flow in flows})
    decoder = RecordDecoder(limits=written.limits)
    for flow, where in of.items():
        first, end = starts[where], ends[where].end_offset
        report = FlowReport(flow=flow, first=first, next_offset=end)
        log = KafkaSource(client, where, topic_id=None)
        if proof.deep:
            copies.verify_deep(report, log, decoder, first, end)
        if proof.against_source:
            copies.verify_against_source(
                report,
                spec=written,
                log=log,
                first=first,
                source=proof.source(flow.source),
                view=views[flow.source],
                decoder=decoder,
                compacted=proof.compacted,
            )
        proof.on_object()
        yield report


def _verify_translated(
    proof: _Proof, written: KafkaSpec, of: Mapping[FlowId, TopicPartition]
) -> Iterator[FlowReport]:

    client, decoder = proof.clients(written.cluster), RecordDecoder(limits=written.limits)
    reader = ProgressReader(client)
    for flow, where in of.items():
        report = FlowReport(flow=flow)
        try:
            report.next_offset, start, end = _stand(client, reader, written, flow)
        except LogmirrorError as error:
            report.add_problem(error)
            yield report
            continue
        log = KafkaSource(client, where, topic_id=None)
        if proof.deep:
            copies.verify_deep(report, log, decoder, start, end)
        if proof.against_source and report.next_offset is not None:
            copies.verify_translated(
                report,
                spec=written,
                log=log,
                bounds=(start, end),
                source=proof.source(flow.source),
                view=proof.views({flow.source})[flow.source],
                decoder=decoder,
                compacted=proof.compacted,
            )
        # A takeover without progress compares the records before it continues.
        if proof.against_source and report.next_offset is None and written.takeover is None:
            _check_nothing_copied(report, log, decoder, start, end)
        proof.on_object()
        yield report


def _check_nothing_copied(
    report: FlowReport, log: KafkaSource, decoder: RecordDecoder, start: int, end: int
) -> None:
    """Report committed records of transactions: only progress says which of the source's they are.

    Records that other clients wrote without transactions are skipped, as in a comparison.
    """
    found = chunks(log, decoder, start, end, only_transactions=True)
    try:
        if any(table.num_rows for table, _ in found):
            raise CorruptionError(
                "the replica has records, but no progress",
                hint="the progress topic was deleted, or the mirror was renamed: a run would copy "
                "all records again",
                end=end,
            )
    except LogmirrorError as error:
        report.add_problem(error)


def _stand(
    client: ClusterClient, reader: ProgressReader, written: KafkaSpec, flow: FlowId
) -> tuple[int | None, int, int]:
    """Return a translated replica's position, and its log start and last stable offset."""
    where = target(written, flow)
    target_id = client.topic(written.topic).topic_id

    def position() -> int | None:
        found = current(reader.refresh(may_be_missing=True), written, flow, target_id)
        return None if found is None else found.next_offset

    for _ in range(_LISTINGS_MAX):
        before = position()
        start, end = (client.list_offsets([where], at)[where] for at in (EARLIEST, LATEST))
        if position() == before:  # no transaction ended between the two reads
            return before, start, end
    raise UnavailableError(
        "the replica changes too fast to be verified", hint="stop its mirror while it is verified"
    )


def _report(found: FlowReport) -> VerifyReport:
    return VerifyReport(
        mirror=found.flow.mirror,
        destination=found.flow.destination,
        topic=found.flow.topic,
        partition=found.flow.partition,
        objects=found.objects,
        first=found.first,
        next_offset=found.next_offset,
        records=found.record_count,
        gap_offsets=found.gap_offsets,
        gaps_by_cause={cause: n for cause, n in sorted(found.gap_counts.items()) if n},
        gaps=tuple(found.gap_runs),
        bytes=found.object_bytes,
        without_digest=found.unwitnessed,
        compared=found.compared,
        gone_at_source=found.gone,
        compacted_since=found.compacted_since,
        claimed=found.claimed,
        unfinished_compactions=tuple(found.unfinished),
        group_snapshots=found.group_snapshots,
        groups_as_of_ms=found.groups_as_of_ms,
        problems=tuple(
            Problem(
                kind=str(problem["kind"]),
                message=str(problem["message"]),
                hint=str(problem["hint"]),
                facts=cast("dict[str, str]", problem["facts"]),
            )
            for problem in found.problems
        ),
    )


def _held_partitions(store: BlobStore, destination: str) -> list[int]:
    return sorted(int(name) for name in store.folders(destination) if name.isdecimal())
