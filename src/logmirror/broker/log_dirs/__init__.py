"""Log directories, and moves of partitions between them (KIP-113)."""
