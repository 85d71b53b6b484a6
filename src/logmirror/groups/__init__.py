"""Consumer groups across clusters: where a group of the source continues in a replica."""
