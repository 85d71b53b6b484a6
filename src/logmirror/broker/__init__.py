"""The embedded Kafka-compatible broker."""
