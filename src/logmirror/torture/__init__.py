"""`logmirror torture`: the product against itself on this machine, under faults, judged."""
