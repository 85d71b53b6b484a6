"""Flows into clusters: at the source's offsets (`preserve`), or at new ones (`translate`)."""
