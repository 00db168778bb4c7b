"""Where the time went: counts, traces, logs of workers, how many workers are worth having."""
