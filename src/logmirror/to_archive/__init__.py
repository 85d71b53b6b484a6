"""Flows into archives: positions, objects, claims, snapshots."""
