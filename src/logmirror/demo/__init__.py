"""`logmirror demo`: the main job on this machine, on real records, interrupted and proven."""
