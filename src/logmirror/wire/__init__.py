"""The Kafka protocol and record batches, sans-IO."""
