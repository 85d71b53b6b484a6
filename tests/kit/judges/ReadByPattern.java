import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.SubscriptionPattern;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * Reads the topics whose names match an expression of RE2/J, in a group of KIP-848, and prints topic
 * and value of each record.
 *
 * <p>Arguments: bootstrap servers, expression, group, number of records.
 */
public final class ReadByPattern {
    public static void main(String[] arguments) {
        Map<String, Object> config = new HashMap<>();
        config.put("bootstrap.servers", arguments[0]);
        config.put("group.id", arguments[2]);
        config.put("group.protocol", "consumer");
        config.put("auto.offset.reset", "earliest");
        StringDeserializer text = new StringDeserializer();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(config, text, text)) {
            consumer.subscribe(new SubscriptionPattern(arguments[1]));
            for (int left = Integer.parseInt(arguments[3]); left > 0; ) {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(200))) {
                    System.out.println(record.topic() + " " + record.value());
                    left--;
                }
            }
        }
    }
}
