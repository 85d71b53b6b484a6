"""Exact copies of Kafka partitions, each of which can be proven."""
