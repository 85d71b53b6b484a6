"""`logmirror torture`: fault injection on this machine."""
