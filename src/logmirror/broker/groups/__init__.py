"""Consumer groups: the coordinator's decisions."""
