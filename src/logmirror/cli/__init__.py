"""The command `logmirror`: arguments, printing, exit codes; `main` lists the commands."""
