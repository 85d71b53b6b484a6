"""Deterministic simulation of logmirror's code: virtual time, random faults, one seed per run."""
