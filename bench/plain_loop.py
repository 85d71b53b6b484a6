"""The peer: a plain loop. Consume and produce until the log end offsets at the start.

    plain_loop.py SOURCE TARGET TOPIC

Prints the start and the end of its flow, in seconds since the epoch, and its record count, as JSON.
It preserves neither offsets nor order across a crash. The topic exists at the target.
"""

import json
import sys
import time

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition

source, target, topic = sys.argv[1:]
consumer = Consumer(
    {
        "bootstrap.servers": source,
        "group.id": "plain-loop",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "fetch.message.max.bytes": 8 << 20,
        "queued.max.messages.kbytes": 128 << 10,
    }
)
producer = Producer(
    {
        "bootstrap.servers": target,
        "enable.idempotence": True,
        "batch.size": 512 << 10,
        "linger.ms": 20,
        "queue.buffering.max.kbytes": 128 << 10,
    }
)
failed = []
partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
ends = {n: consumer.get_watermark_offsets(TopicPartition(topic, n))[1] for n in partitions}
missing = sum(ends.values())
began = time.time()
consumer.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for n in partitions])
count = 0
while count < missing and not failed:
    for message in consumer.consume(10_000, timeout=1.0):
        if message.error():
            raise KafkaException(message.error())
        while True:
            try:
                producer.produce(
                    topic,
                    message.value(),
                    message.key(),
                    partition=message.partition(),
                    timestamp=message.timestamp()[1],
                    headers=message.headers(),
                    on_delivery=lambda error, _: failed.append(error) if error else None,
                )
                break
            except BufferError:
                producer.poll(0.1)
        count += 1
    producer.poll(0)
left = producer.flush(60)
print(json.dumps({"began": began, "ended": time.time(), "records": count, "left": left}))
consumer.close()
sys.exit(1 if failed or left else 0)
