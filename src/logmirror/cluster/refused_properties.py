"""librdkafka properties that have no effect here, with the reason: refused instead of ignored."""

from __future__ import annotations

from typing import Final

_REASONS: Final[dict[str, tuple[str, ...]]] = {
    "no consumer group is used; the position is read from the destination": (
        "group.id group.instance.id group.protocol group.protocol.type group.remote.assignor",
        "partition.assignment.strategy session.timeout.ms heartbeat.interval.ms",
        "coordinator.query.interval.ms max.poll.interval.ms max.poll.records enable.auto.commit",
        "auto.commit.enable auto.commit.interval.ms enable.auto.offset.store auto.offset.reset",
        "offset.store.method offset.store.path offset.store.sync.interval.ms",
        "share.acknowledgement.mode",
    ),
    "reads are always read_committed, up to the last stable offset": ("isolation.level",),
    "topics are never created by reading them": ("allow.auto.create.topics",),
    "records are always read from the partition's leader": ("client.rack",),
    "nothing is queued between fetches": (
        "queued.min.messages queued.max.messages.kbytes fetch.queue.backoff.ms",
        "fetch.error.backoff.ms enable.partition.eof queuing.strategy",
        "consume.callback.max.messages consume_cb rebalance_cb offset_commit_cb",
    ),
    "records are always produced in order, with acks=all, in the source's batches": (
        "acks request.required.acks enable.idempotence enable.gapless.guarantee transactional.id",
        "transaction.timeout.ms queue.buffering.max.messages queue.buffering.max.kbytes",
        "queue.buffering.max.ms linger.ms message.send.max.retries retries message.timeout.ms",
        "delivery.timeout.ms queue.buffering.backpressure.threshold compression.codec",
        "compression.type compression.level batch.num.messages batch.size message.max.bytes",
        "message.copy.max.bytes delivery.report.only.error dr_cb dr_msg_cb partitioner",
        "partitioner_cb",
        "sticky.partitioning.linger.ms produce.offset.report msg_order_cmp",
        "max.in.flight max.in.flight.requests.per.connection",
    ),
    "Kerberos is not supported, see sasl.mechanism": (
        "sasl.kerberos.service.name sasl.kerberos.principal sasl.kerberos.kinit.cmd",
        "sasl.kerberos.keytab sasl.kerberos.min.time.before.relogin",
    ),
    "OAuth supports client credentials and unsigned tokens only": (
        "sasl.oauthbearer.grant.type sasl.oauthbearer.assertion.algorithm",
        "sasl.oauthbearer.assertion.claim.aud sasl.oauthbearer.assertion.claim.exp.seconds",
        "sasl.oauthbearer.assertion.claim.iss sasl.oauthbearer.assertion.claim.jti.include",
        "sasl.oauthbearer.assertion.claim.nbf.seconds sasl.oauthbearer.assertion.claim.sub",
        "sasl.oauthbearer.assertion.file sasl.oauthbearer.assertion.jwt.template.file",
        "sasl.oauthbearer.assertion.private.key.file",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "sasl.oauthbearer.assertion.private.key.pem sasl.oauthbearer.metadata.authentication.type",
        "sasl.oauthbearer.sub.claim.name sasl.oauthbearer.client.credentials.client.id",
        "sasl.oauthbearer.client.credentials.client.secret oauthbearer_token_refresh_cb",
        "oauth_cb enable_sasl_queue",
    ),
    "certificates and keys must be PEM, see ssl.ca.*, ssl.certificate.* and ssl.key.*": (
        "ssl.keystore.location ssl.keystore.password ssl.ca.certificate.stores ssl.engine.location",
        "ssl.engine.id ssl.engine.callback.data ssl.providers ssl_key ssl_certificate ssl_ca",
        "ssl.certificate.verify_cb ssl.crl.location ssl.curves.list ssl.sigalgs.list",
    ),
    "versions are negotiated with each broker": (
        "api.version.request api.version.request.timeout.ms api.version.fallback.ms",
        "broker.version.fallback",
    ),
    "metadata is refreshed on errors, and by topic.metadata.refresh.interval.ms": (
        "metadata.max.age.ms metadata.request.timeout.ms metadata.recovery.strategy",
        "metadata.recovery.rebootstrap.trigger.ms topic.metadata.refresh.fast.interval.ms",
        "topic.metadata.refresh.fast.cnt topic.metadata.refresh.sparse",
        "topic.metadata.propagation.max.ms topic.blacklist enable.sparse.connections",
    ),
    "connections are opened on demand, try every address of a name, and are reopened when lost": (
        "connections.max.idle.ms broker.address.ttl client.dns.lookup socket.max.fails",
        "socket.nagle.disable socket.blocking.max.ms reconnect.backoff.jitter.ms",
        "socket_cb connect_cb closesocket_cb open_cb resolve_cb",
    ),
    "it configures librdkafka's own logging, statistics or tests": (
        "debug log_level log_cb log.queue log.thread.name log.connection.close",
        "statistics.interval.ms stats_cb enabled_events error_cb throttle_cb background_event_cb",
        "opaque default_topic_conf interceptors plugin.library.paths internal.termination.signal",
        "enable.random.seed enable.metrics.push builtin.features client.software.name",
        "client.software.version test.mock.num.brokers test.mock.broker.rtt ut_handle_ApiVersion",
    ),
}

REFUSED: Final[dict[str, str]] = {
    name: reason for reason, lines in _REASONS.items() for line in lines for name in line.split()
}
"""Name to reason. The reason fits after a colon."""
