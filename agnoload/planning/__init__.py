"""What an epoch asks for, and how far it has been delivered. It runs in the user's process and loads no data.

    EpochCounter ──► EpochPosition ──► a plan ── next() ──────► Request ──► window ──► pool ──► fetching
     (seeds, epoch)        ▲           OrderPlan                               │
                           │           UserSamplerPlan ◄─ answered(request, reply) ◄── Reply ◄──┘
                           │           StreamPlan      ◄─ delivered(request, reply) ◄── the user has the batch
                           │              │
       state_dict ◄── Progress ◄──────────┘ position()

Two books hold a request: the window, from its submission until its batch comes out, and the pool that answers it. A
plan holds what it has yet to ask for and how far its epoch has been delivered. `Progress` remembers the last plan that
delivered something; its `position()` is what a state saves.
"""
