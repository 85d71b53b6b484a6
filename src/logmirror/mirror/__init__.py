"""The data path of the mirror, from plan to commit."""
