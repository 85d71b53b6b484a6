"""Where a partition is in a bucket, if others are on disks: the rules; `place_rows` has the rows.

    on a disk     -> objects -> open segment in the chain -> row         -> in the bucket
    in the bucket -> files   -> open segment flushed      -> row removed -> on a disk

- H1 A partition is in the bucket from when its row is in the chain until the removal of the row is.
  Nothing else decides it: no object, no commit, no file.
- H2 Before the row changes, everything that was acknowledged is durable in the new place, and what
  is appended meanwhile is not acknowledged. So each side of the change has every such record.
- H3 The row has the ID of a residence: 16 random bytes of the move, or the topic's ID for a
  partition that was created in the bucket. It is in the names of the objects and in the commits, in
  the place of the topic's ID. A partition that comes back has another one. So objects and commits
  of an earlier residence are never taken for its own, and removing them late does no harm. If a
  start finds commits of a move but not its row, the move has another ID from then on: these commits
  may hold records that were not acknowledged, and are not in the old place.
- H4 Objects of a residence that ended, or never began, are removed after a row of
  `left_partitions` is in the chain.
"""
