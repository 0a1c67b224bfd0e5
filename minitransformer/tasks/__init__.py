"""Real data in, a metric out: one file a task."""
