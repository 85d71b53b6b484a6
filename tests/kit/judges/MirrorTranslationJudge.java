package org.apache.kafka.connect.mirror;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.TopicAuthorizationException;
import org.apache.kafka.connect.util.Callback;

/**
 * Runs MirrorMaker's translation of offsets for tests: its store of offset syncs, its store of
 * checkpoints, and the checkpoint task's decision. A request is a line with a method and its
 * arguments, between tabs; the response is a line of JSON. It is in MirrorMaker's package to call
 * what is not public.
 *
 * Records are `key:value` in hexadecimal digits, between commas.
 */
public final class MirrorTranslationJudge {
    private static final String SOURCE = "source1";
    private static final String TARGET = "target2";

    /** Names topics in log messages. */
    private static final MirrorCheckpointTaskConfig UNUSED = new MirrorCheckpointTaskConfig(Map.of(
        "name", "checkpoints",
        "connector.class", "org.apache.kafka.connect.mirror.MirrorCheckpointConnector",
        "source.cluster.alias", SOURCE,
        "target.cluster.alias", TARGET,
        "task.assigned.groups", "g"));

    private OffsetSyncStore syncs;
    private CheckpointStore checkpoints;
    private MirrorCheckpointTask task;

    public static void main(String[] arguments) throws Exception {
        MirrorTranslationJudge judge = new MirrorTranslationJudge();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String response;
            try {
                response = "{\"result\":" + judge.response(line.split("\t", -1)) + "}";
            } catch (Exception error) {
                String text = error.toString().replaceAll("[^ -!#-\\[\\]-~]", " ");
                response = "{\"error\":\"" + text + "\"}";
            }
            System.out.println(response);
        }
    }

    /** Numbers, truth values, nulls and lists of them print themselves as JSON. */
    private Object response(String[] request) throws Exception {
        List<String> given = Arrays.asList(request).subList(1, request.length);
        switch (request[0]) {
            case "checkpoints":
                return readCheckpoints(given.get(0), records(given.get(1)), given.get(2));
            case "syncs":
                syncs = new GivenSyncs(records(given.get(1)));
                syncs.start(Boolean.parseBoolean(given.get(0)));
                return true;
            case "add":
                records(given.get(0)).forEach(syncs::handleRecord);
                return true;
            case "translate":
                return translations(partition(given), numbers(given.get(2)));
            case "slots":
                return slots(partition(given));
            case "emitted":
                return emitted(given.get(0), partition(given.subList(1, 3)), given.get(3));
            case "rule":
                return rule(Long.parseLong(given.get(0)), given.get(1));
            case "read":
                return readTopics(given);
            default:
                throw new IllegalArgumentException(request[0]);
        }
    }

    // -- stores whose records the test gives ------------------------------------------------------

    private static final class GivenSyncs extends OffsetSyncStore {
        private final List<ConsumerRecord<byte[], byte[]>> before;

        GivenSyncs(List<ConsumerRecord<byte[], byte[]>> before) {
            this.before = before;
        }

        @Override
        void backingStoreStart() {
            before.forEach(this::handleRecord);
        }
    }

    private static final class GivenCheckpoints extends CheckpointStore {
        private final List<ConsumerRecord<byte[], byte[]>> records;
        private final boolean isReadable;

        GivenCheckpoints(
                Set<String> groups, List<ConsumerRecord<byte[], byte[]>> records, boolean isReadable) {
            super(UNUSED, groups);
            this.records = records;
            this.isReadable = isReadable;
        }

        @Override
        void readCheckpointsImpl(
                MirrorCheckpointTaskConfig config,
                Callback<ConsumerRecord<byte[], byte[]>> consumed) {
            records.forEach(record -> consumed.onCompletion(null, record));
            if (!isReadable) {
                consumed.onCompletion(new TopicAuthorizationException("checkpoints"), null);
            }
        }
    }

    /** Start, is initialized, number of checkpoints. */
    private Object readCheckpoints(
            String groups, List<ConsumerRecord<byte[], byte[]>> records, String isReadable) {
        checkpoints =
            new GivenCheckpoints(Set.of(groups.split(",")), records, Boolean.parseBoolean(isReadable));
        boolean isRead = checkpoints.start();
        int count = checkpoints.checkpointsPerConsumerGroup.values().stream().mapToInt(Map::size).sum();
        return List.of(isRead, checkpoints.isInitialized(), count);
    }

    /** As MirrorCheckpointTask.start does it, with the topics of brokers. */
    private Object readTopics(List<String> properties) {
        Map<String, String> config = new HashMap<>();
        properties.forEach(one -> config.put(one.split("=", 2)[0], one.split("=", 2)[1]));
        MirrorCheckpointTaskConfig given = new MirrorCheckpointTaskConfig(config);
        checkpoints = new CheckpointStore(given, given.taskConsumerGroups());
        boolean isRead = checkpoints.start();
        if (syncs != null) {
            syncs.close();
        }
        syncs = new OffsetSyncStore(given);
        syncs.start(!isRead);
        return isRead;
    }

    // -- what they decide --------------------------------------------------------------------------

    private Object translations(TopicPartition where, List<Long> offsets) {
        List<Object> found = new ArrayList<>();
        for (Long offset : offsets) {
            OptionalLong one = syncs.translateDownstream("g", where, offset);
            found.add(one.isPresent() ? one.getAsLong() : null);
        }
        return found;
    }

    private Object slots(TopicPartition where) {
        List<Long> found = new ArrayList<>();
        for (int slot = 0; slot < OffsetSyncStore.SYNCS_PER_PARTITION; slot++) {
            long upstream = syncs.syncFor(where, slot).upstreamOffset();
            if (found.isEmpty() || found.get(found.size() - 1) != upstream) {
                found.add(upstream);
            }
        }
        return found;
    }

    /** One round of the task for a group; null: no checkpoint. */
    private Object emitted(String group, TopicPartition where, String offset) {
        task = new MirrorCheckpointTask(
            SOURCE, TARGET, new IdentityReplicationPolicy(), syncs, Set.of(group), Map.of(),
            checkpoints);
        Map<TopicPartition, Checkpoint> found = task.checkpointsForGroup(
            Map.of(where, new OffsetAndMetadata(Long.parseLong(offset))), group);
        checkpoints.update(group, found);
        return found.containsKey(where) ? found.get(where).downstreamOffset() : null;
    }

    /** Whether each record's pair is a sync; the state is reset after each that is. */
    private static Object rule(long lagMax, String pairs) {
        OffsetSyncWriter.PartitionState state = new OffsetSyncWriter.PartitionState(lagMax);
        List<Boolean> found = new ArrayList<>();
        for (String pair : pairs.split(",")) {
            String[] offsets = pair.split(":");
            boolean isDue = state.update(Long.parseLong(offsets[0]), Long.parseLong(offsets[1]));
            found.add(isDue);
            if (isDue) {
                state.reset();
            }
        }
        return found;
    }

    // -- arguments ---------------------------------------------------------------------------------

    private static TopicPartition partition(List<String> given) {
        return new TopicPartition(given.get(0), Integer.parseInt(given.get(1)));
    }

    private static List<Long> numbers(String text) {
        return Arrays.stream(text.split(",")).map(Long::parseLong).collect(Collectors.toList());
    }

    private static List<ConsumerRecord<byte[], byte[]>> records(String text) {
        List<ConsumerRecord<byte[], byte[]>> found = new ArrayList<>();
        for (String pair : text.isEmpty() ? new String[0] : text.split(",")) {
            String[] parts = pair.split(":", -1);
            byte[] key = HexFormat.of().parseHex(parts[0]);
            byte[] value = HexFormat.of().parseHex(parts[1]);
            found.add(new ConsumerRecord<>("topic", 0, found.size(), key, value));
        }
        return found;
    }
}
