"""Replicate Kafka partitions exactly, to Kafka, directories or S3, and verify the replicas.

    import logmirror

    settings = logmirror.load("mirror.yaml")
    logmirror.run(settings, until_now=True)
    for report in logmirror.verify(settings, against_source=True):
        print(report.topic, report.partition, report.next_offset, report.ok)

`logmirror.dataframes` reads archives as Spark DataFrames; `logmirror.testing` has what tests need.
"""

from logmirror.api import (
    apply_groups,
    bucket_policies,
    check,
    compact,
    conditional_write_policies,
    group_status,
    json_schema,
    kafka_acls,
    load,
    plan_groups,
    plan_text,
    read_plan,
    rollback_groups,
    run,
    status,
    verify,
)
from logmirror.config.problems import ConfigError
from logmirror.errors import (
    CorruptionError,
    FencedError,
    InternalError,
    LogmirrorError,
    OutcomeUnknownError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.reports import (
    Acl,
    CheckReport,
    ClusterAcls,
    CompactReport,
    Event,
    GroupLinkStatus,
    GroupOutcome,
    GroupPlan,
    GroupStep,
    MirrorProgress,
    NextRecord,
    PartitionStatus,
    Problem,
    RunProgress,
    VerifyReport,
)

__all__ = [
    "Acl",
    "CheckReport",
    "ClusterAcls",
    "CompactReport",
    "ConfigError",
    "CorruptionError",
    "Event",
    "FencedError",
    "GroupLinkStatus",
    "GroupOutcome",
    "GroupPlan",
    "GroupStep",
    "InternalError",
    "LogmirrorError",
    "MirrorProgress",
    "NextRecord",
    "OutcomeUnknownError",
    "PartitionStatus",
    "PositionError",
    "Problem",
    "RunProgress",
    "UnavailableError",
    "UsageError",
    "VerifyReport",
    "apply_groups",
    "bucket_policies",
    "check",
    "compact",
    "conditional_write_policies",
    "group_status",
    "json_schema",
    "kafka_acls",
    "load",
    "plan_groups",
    "plan_text",
    "read_plan",
    "rollback_groups",
    "run",
    "status",
    "verify",
]
