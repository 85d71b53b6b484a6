"""`logmirror demo`: replicate a real data set on this machine, kill the mirror, verify."""
