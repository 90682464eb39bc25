"""The pure core: everything that decides, as plain Python without Ray, clocks, threads or files.

There are two state machines. `StagingState` decides which blocks are made, handed out, kept and dropped; `Supervisor`
decides who works where. Both take an event and return instructions, ``handle(event, now)``; the coordinator's actors
carry these out.

A minibatch lies in a block: a run of consecutive minibatches of one epoch that is made, staged and handed out as one
(those of a consumer with a batch size of its own may cross into the next).
A block consists of parts, one for each node on which samples of it have their home. A feed is an endless stream of
blocks, and a consumer is a cursor on it.

A map, each module in one line:

================  ======================================================================================================
`state`           `StagingState.handle`: which event changes what; after each, deliver, drop, give out work
`events`          what can happen to staging, and what the shell must then do
`calls`           checks what consumers send, before it becomes an event
`consumers`       who is where in the stream: consumers, reservations, cohorts. **Must a block stay?** `Cohort.wanted`
`reservations`    how long places are held for trials that are to come
`epochs`          how each epoch is shuffled; where a consumer may begin in the middle of one
`scheduling`      which worker makes what next. **When is a block dropped?** `Scheduler.drop_unwanted`, `_make_room`
`window`          the staged blocks, their parts, and their budget of bytes
`holding`         how much of that budget consumers may hold, so that the next block always has room
`moving`          what of it is copied from a machine that will be gone soon
`tasks`           what each prep worker has in hand
`transitions`     the states of parts, blocks, consumers and workers, and which may follow which
`story`           what happened to a block, a consumer or a worker
`explain`         why a consumer waits; whether the tables agree with each other
`supervisor`      who works where: workers and caches. **When the last worker dies?** `Supervisor._match_worker_count`
`supervised`      a prep worker and a cache node as the supervisor sees them, and the phases of their lives
`homes`           on which machines samples have their homes, and when that should change
`lanes`           which further lanes serve, and which are silent and are started anew
`lane_following`  what the main coordinator and the further lanes make of what they tell each other
`lane_messages`   what they tell each other
`waits`           who or what a feed waits for, and when its log says so
`cluster_events`  what can happen to workers, caches and nodes, and what the shell must then do
`layout`          samples in a block, bounds and budgets: fixed when a feed opens
`ranks`           which rank of a data-parallel trial takes what, and where ranks begin together
`demand`          what the last seconds say: how much trials want, what prep can make
`pace`            which trials go apart because of their pace
`peer_idle`       how long prep was idle because consumers wait for each other
`slot_use`        whether blocks are made in slots of workers' memory, and in how many
`ledgers`         what each consumer received in each of its epochs
================  ======================================================================================================

A state changes in one method, its owner's ``transition``. ``validate`` checks every invariant; tests call it after
every event, in ten thousand random schedules of a feed.
"""
