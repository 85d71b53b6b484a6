"""The driver's loop: poll the source, plan slices, run them, commit their results."""
