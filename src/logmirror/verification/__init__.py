"""Prove a copy: its names, its content, and what the source still shows."""
