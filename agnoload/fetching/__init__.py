"""How a request becomes a batch: the same code in this thread, in threads and in workers."""
