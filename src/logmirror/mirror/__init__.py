"""The driver's loop: plan slices, run them, commit what came of them."""
