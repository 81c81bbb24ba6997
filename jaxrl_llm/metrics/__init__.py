"""What a run says of itself: metrics and their writers, the console, logs, health, traces."""
