"""A Kafka cluster as its client sees it."""
