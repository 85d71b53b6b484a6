"""The shared archive core: one set of names, claims and formats for every store."""
