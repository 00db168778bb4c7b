"""What an epoch asks for, and how far it has been delivered. It runs in the user's process and loads no data.

    EpochCounter ──► EpochPosition ──► a plan ── next() ──────► Request ──► window ──► pool ──► fetching
     (seeds, epoch)        ▲           OrderPlan                               │
                           │           UserSamplerPlan ◄─ answered(request, reply) ◄── Reply ◄──┘
                           │           StreamPlan      ◄─ delivered(request, reply) ◄── the user has the batch
                           │              │
       state_dict ◄── Progress ◄──────────┘ position()

A request stands in two books: in the window, from its submission until its batch comes out, and in the pool that
answers it. A plan holds what it has yet to ask for and how far its epoch has been delivered. The last plan that
delivered something is what `Progress` remembers, and its `position()` is what a state saves.
"""
