"""What each command does with its arguments, and what it prints; `logmirror.cli` names them."""
