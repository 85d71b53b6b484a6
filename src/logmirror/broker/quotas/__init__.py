"""Client quotas: for whom they are, which one applies, and how long a client must wait."""
