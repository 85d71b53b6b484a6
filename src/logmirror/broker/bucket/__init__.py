"""A log dir in a bucket: commit objects, sealed segments, and who may write them."""
