"""Transactions: the coordinator's decisions."""
