"""Where slices run: Spark on the driver, the worker process on the executors."""
