import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.connect.mirror.RemoteClusterUtils;

/**
 * A service that reads a topic in a group, prints each record in one write, and commits after every
 * 20 records. With the alias of a source, it starts where MirrorMaker's client translates its group
 * to, not at its committed offsets.
 *
 * <p>Arguments: bootstrap servers, topic, group, pause after a record in ms, alias or nothing.
 */
public final class GroupService {
    private static final int COMMITTED_AFTER = 20;
    private static final Duration TIMEOUT = Duration.ofSeconds(30);

    public static void main(String[] arguments) throws Exception {
        Map<String, Object> config = new HashMap<>();
        config.put("bootstrap.servers", arguments[0]);
        Map<TopicPartition, OffsetAndMetadata> starts = arguments.length > 4
            ? RemoteClusterUtils.translateOffsets(config, arguments[4], arguments[2], TIMEOUT)
            : Map.of();
        config.put("group.id", arguments[2]);
        config.put("enable.auto.commit", "false");
        config.put("auto.offset.reset", "earliest");
        config.put("isolation.level", "read_committed");
        ByteArrayDeserializer bytes = new ByteArrayDeserializer();
        FileOutputStream out = new FileOutputStream(FileDescriptor.out);
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(config, bytes, bytes)) {
            consumer.subscribe(List.of(arguments[1]), new ConsumerRebalanceListener() {
                @Override
                public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
                }

                @Override
                public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                    starts.forEach((where, at) -> {
                        if (partitions.contains(where)) {
                            consumer.seek(where, at);
                        }
                    });
                }
            });
            read(consumer, out, Long.parseLong(arguments[3]));
        }
    }

    private static void read(KafkaConsumer<byte[], byte[]> consumer, FileOutputStream out, long pauseMs)
        throws IOException, InterruptedException {
        int count = 0;
        Map<TopicPartition, OffsetAndMetadata> processed = new HashMap<>();
        while (true) {
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                String value = new String(record.value(), StandardCharsets.UTF_8);
                out.write(("> " + value + "\n").getBytes(StandardCharsets.UTF_8));
                TopicPartition where = new TopicPartition(record.topic(), record.partition());
                processed.put(where, new OffsetAndMetadata(record.offset() + 1));
                if (++count % COMMITTED_AFTER == 0) {
                    consumer.commitSync(processed);
                }
                Thread.sleep(pauseMs);
            }
        }
    }
}
