"""What a run reports: metrics and their writers, the console, logs, health, traces."""
