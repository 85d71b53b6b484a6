"""Moves of partitions between log directories (KIP-113)."""
