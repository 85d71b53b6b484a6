"""What a run reports: metrics, the port that serves them, log lines."""
