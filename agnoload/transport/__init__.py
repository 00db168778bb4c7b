"""How objects travel between the user's process and the workers: the payload once, then batches, errors and memory.

    user's process                                          worker process
    ──────────────                                          ──────────────
    at the start, once for all workers
      payload.pack ──► a file without a name ─────────────► payload.Payload    (mapped privately: copy on write)
        pickling       lambdas, classes of a script           learn_classes     (they go back by name)
        mapped         arrays in mapped files, by place       the same file, mapped again
        spawning       locks and queues of multiprocessing    the same lock
        memory         descriptors of shared files            Receiving

    for each batch
      Arena.acquire ──► slot number, in a ticket ─────────► Slots[number]
                                                              collate writes into Slot.empty
      wire.decode ◄──── EncodedSpan, in a ticket ─────────── wire.encode        (arrays stay where they lie)
      Arena.lend ─► Lease ◄─ every array of the batch
      the last array dies ─► the lease dies ─► the slot is free

    when a sample fails
      remote_errors.restore ◄── Described, as a batch ────── remote_errors.describe

Worker threads need none of this but `buffer_pool`: memory that large arrays are written into again and again.
"""
