"""One module per group of requests: what the broker does with each, and in which versions."""
