"""Replication to archives: positions, objects, claims, snapshots."""
