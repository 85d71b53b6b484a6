package org.apache.kafka.connect.mirror;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Runs MirrorMaker's client for tests. Arguments are its properties: `name=value`. A request is a
 * line with a method and its arguments, between tabs; the response is a line of JSON. It is in the
 * client's package to call what is not public.
 */
public final class MirrorClientJudge {
    private final Map<String, Object> properties = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        MirrorClientJudge judge = new MirrorClientJudge();
        for (String argument : arguments) {
            String[] pair = argument.split("=", 2);
            judge.properties.put(pair[0], pair[1]);
        }
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            Map<String, Object> response = new HashMap<>();
            try {
                response.put("result", judge.response(line.split("\t", -1)));
            } catch (Exception error) {
                response.put("error", error.toString());
            }
            out.println(json(response));
        }
    }

    private Object response(String[] request) throws Exception {
        List<String> given = Arrays.asList(request).subList(1, request.length);
        switch (request[0]) {
            case "translateOffsets":
                return offsets(RemoteClusterUtils.translateOffsets(
                    properties, given.get(0), given.get(1), milliseconds(given.get(2))));
            case "remoteConsumerOffsets":
                try (MirrorClient client = new MirrorClient(properties)) {
                    return offsets(client.remoteConsumerOffsets(
                        given.get(0), given.get(1), milliseconds(given.get(2))));
                }
            case "upstreamClusters":
                return RemoteClusterUtils.upstreamClusters(properties);
            case "replicationHops":
                return RemoteClusterUtils.replicationHops(properties, given.get(0));
            case "checkpointTopics":
                return RemoteClusterUtils.checkpointTopics(properties);
            case "heartbeatTopics":
                return RemoteClusterUtils.heartbeatTopics(properties);
            case "remoteTopics":
                try (MirrorClient client = new MirrorClient(properties)) {
                    return client.remoteTopics();
                }
            case "checkpoints":
                return records(given.get(0)).stream().map(MirrorClientJudge::checkpoint).toList();
            case "heartbeats":
                return records(given.get(0)).stream().map(MirrorClientJudge::heartbeat).toList();
            case "names":
                return given.subList(1, given.size()).stream()
                    .map(topic -> names(given.get(0), topic)).toList();
            default:
                throw new IllegalArgumentException(request[0]);
        }
    }

    private static Duration milliseconds(String text) {
        return Duration.ofMillis(Long.parseLong(text));
    }

    private static Object offsets(Map<TopicPartition, OffsetAndMetadata> found) {
        List<Object> rows = new ArrayList<>();
        found.forEach((where, at) -> rows.add(
            List.of(where.topic(), where.partition(), at.offset(), at.metadata())));
        return rows;
    }

    private List<ConsumerRecord<byte[], byte[]>> records(String topic) {
        Map<String, Object> config = new HashMap<>(properties);
        config.keySet().retainAll(List.of("bootstrap.servers"));
        ByteArrayDeserializer bytes = new ByteArrayDeserializer();
        TopicPartition where = new TopicPartition(topic, 0);
        List<ConsumerRecord<byte[], byte[]>> found = new ArrayList<>();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(config, bytes, bytes)) {
            consumer.assign(List.of(where));
            consumer.seekToBeginning(List.of(where));
            long end = consumer.endOffsets(List.of(where)).get(where);
            while (consumer.position(where) < end) {
                consumer.poll(Duration.ofMillis(200)).forEach(found::add);
            }
        }
        return found;
    }

    private static Object checkpoint(ConsumerRecord<byte[], byte[]> record) {
        Checkpoint one = Checkpoint.deserializeRecord(record);
        return List.of(one.consumerGroupId(), one.topicPartition().topic(),
            one.topicPartition().partition(), one.upstreamOffset(), one.downstreamOffset(),
            one.metadata());
    }

    private static Object heartbeat(ConsumerRecord<byte[], byte[]> record) {
        Heartbeat one = Heartbeat.deserializeRecord(record);
        return List.of(one.sourceClusterAlias(), one.targetClusterAlias(), one.timestamp());
    }

    /** What the policy and the client decide by an alias and a topic's name. */
    private Object names(String alias, String topic) {
        ReplicationPolicy policy = new MirrorClientConfig(properties).replicationPolicy();
        MirrorClient client = new MirrorClient(null, policy, Map.of());
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("remote_topic", policy.formatRemoteTopic(alias, topic));
        found.put("topic_source", policy.topicSource(topic));
        found.put("upstream_topic", policy.upstreamTopic(topic));
        found.put("original_topic", policy.originalTopic(topic));
        found.put("offset_syncs_topic", policy.offsetSyncsTopic(alias));
        found.put("checkpoints_topic", policy.checkpointsTopic(alias));
        found.put("is_heartbeats", policy.isHeartbeatsTopic(topic));
        found.put("is_checkpoints", policy.isCheckpointsTopic(topic));
        found.put("is_internal", policy.isInternalTopic(topic));
        found.put("hops", client.countHopsForTopic(topic, alias));
        found.put("sources", new TreeSet<>(client.allSources(topic)));
        return found;
    }

    private static String json(Object value) {
        if (value == null || value instanceof Number || value instanceof Boolean) {
            return String.valueOf(value);
        }
        if (value instanceof Map<?, ?> map) {
            return map.entrySet().stream().map(pair -> json(pair.getKey()) + ":" + json(pair.getValue()))
                .collect(Collectors.joining(",", "{", "}"));
        }
        if (value instanceof Collection<?> values) {
            return values.stream().map(MirrorClientJudge::json).collect(Collectors.joining(",", "[", "]"));
        }
        StringBuilder text = new StringBuilder("\"");
        for (char one : value.toString().toCharArray()) {
            text.append(one < ' ' || one > '~' || one == '"' || one == '\\'
                ? String.format("\\u%04x", (int) one) : one);
        }
        return text.append('"').toString();
    }
}
