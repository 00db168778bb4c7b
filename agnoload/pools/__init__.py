"""What answers requests: this thread, a pool of threads, or worker processes."""
