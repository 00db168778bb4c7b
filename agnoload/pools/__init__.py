"""What answers requests: this thread, a pool of threads, or worker processes.

How a batch travels through a pool of processes, and which file does what:

    the user's process                                     worker processes (any number)

    processes  submit(request)
        │      request ──► slot of the arena  ─ ─ shared ─ ─ ►  worker  request ◄── slot
        │                                       memory                  │
     channel   RequestTicket ════════ pipe ═══════════════►   channel   │  any free worker reads the next one
        │                                                     status ◄──┤  "claimed": written to the status board
        │                                                               │
        │                                                       fetch(request, slot.empty)
        │                                                               │
        │      slot  ◄ ─ ─ ─ ─ ─ ─ shared memory ─ ─ ─ ─ ─ ─ ─  encode(batch, slot)
     channel   ReplyTicket ◄═════════ pipe ════════════════   channel ◄─┘
        │
    processes  receive() ──► Reply, its arrays lie in the slot
        │
      crew     starts (preload: imports; launcher ─► server), watches and ends the workers
    diagnose   says why one died, from its exit status and the status board, or what it is busy with

The parent waits in one `poll`: for the pipe of replies, and for a descriptor of each worker that becomes readable when
the worker ends. So nothing is polled by the clock. When a worker dies, the board says which request it had claimed;
tickets that nobody has read are still in the pipe.

Another kind of pool is a `Pool` as `protocols` describes it, and calls a `WorkerFetch` wherever its workers are, with a
`Request` and the memory for its batch: `inline` is the shortest, `threads` the next. `PoolKeeper.start` makes it. Its
name, a `worker_type`, is checked in `options`; where code asks for the worker type, it asks whether workers share this
process. `tests/pools/test_contract.py` tests what all kinds promise: add the new one to its `KINDS`.
"""
