// A service on KafkaJS, for tests: node kafkajs_service.js BOOTSTRAP TOPIC COUNT
//
// Creates TOPIC and TOPIC-out, writes COUNT records to TOPIC, and copies them to TOPIC-out with two
// members of a group, each batch and its offsets in one transaction. Prints what its admin client sees.
"use strict";
const { CompressionTypes, Kafka, logLevel } = require("kafkajs");

const [bootstrap, topic, count] = process.argv.slice(2);
const kafka = new Kafka({ clientId: "judge", brokers: [bootstrap], logLevel: logLevel.ERROR });
const out = `${topic}-out`;

async function write(admin) {
  const topics = [topic, out].map((name) => ({ topic: name, numPartitions: 2 }));
  await admin.createTopics({ topics, waitForLeaders: true });
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 });
  await producer.connect();
  for (let number = 0; number < Number(count); number += 50) {
    const messages = [...Array(50).keys()].map((n) => ({
      key: `k${number + n}`, value: `v${number + n}`, partition: (number + n) % 2, headers: { n: `${number + n}` },
    }));
    await producer.send({ topic, messages, compression: CompressionTypes.GZIP, acks: -1 });
  }
  await producer.disconnect();
}

async function member(number, seen) {
  const consumer = kafka.consumer({ groupId: topic, sessionTimeout: 6000, heartbeatInterval: 200, readUncommitted: false });
  const producer = kafka.producer({ transactionalId: `${topic}-${number}`, idempotent: true, maxInFlightRequests: 1 });
  await producer.connect();
  await consumer.connect();
  await consumer.subscribe({ topics: [topic], fromBeginning: true });
  await consumer.run({
    autoCommit: false,
    eachBatch: async ({ batch }) => {
      if (batch.messages.length === 0) return;
      const transaction = await producer.transaction();
      const messages = batch.messages.map(({ key, value, headers }) => ({ key, value, headers, partition: batch.partition }));
      await transaction.send({ topic: out, messages });
      const next = (BigInt(batch.lastOffset()) + 1n).toString();
      const topics = [{ topic, partitions: [{ partition: batch.partition, offset: next }] }];
      await transaction.sendOffsets({ consumerGroupId: topic, topics });
      await transaction.commit();
      seen.push(...batch.messages.map(({ value }) => value.toString()));
    },
  });
  return async () => { await consumer.disconnect(); await producer.disconnect(); };
}

async function main() {
  const admin = kafka.admin();
  await admin.connect();
  await write(admin);
  const seen = [];
  const ends = [await member(0, seen), await member(1, seen)];
  while (seen.length < Number(count)) await new Promise((resolve) => setTimeout(resolve, 50));
  const described = (await admin.describeGroups([topic])).groups[0];
  for (const end of ends) await end();
  const offsets = await admin.fetchOffsets({ groupId: topic, topics: [topic] });
  const ended = await admin.fetchTopicOffsets(topic);
  await admin.deleteGroups([topic]);
  await admin.disconnect();
  console.log(JSON.stringify({
    protocol: described.protocolType,
    committed: offsets[0].partitions.map(({ offset }) => Number(offset)),
    ends: ended.map(({ high }) => Number(high)),
    seen: seen.length,
  }));
}

main().catch((error) => { console.error(error); process.exit(1); });
