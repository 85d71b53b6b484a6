"""Executor: read one partition of the source, explain its offset gaps, check its column types."""
