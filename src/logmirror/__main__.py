"""`python -m logmirror`: the same as the command `logmirror`."""

from logmirror.cli.main import main

main()
