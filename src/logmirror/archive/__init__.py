"""The archive: names, chain, claims, and the three formats of its objects."""
