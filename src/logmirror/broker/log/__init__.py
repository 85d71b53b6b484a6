"""One partition's log on disk: segments, recovery, producer state, group commit."""
