"""Who may come in, and what they may do: listeners, users, certificates and ACLs."""
