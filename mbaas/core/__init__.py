"""All decisions of a feed, as pure Python without Ray, clocks, threads or files.

There are two state machines. `StagingState` decides which blocks are prepared, delivered, kept and
dropped; `Supervisor` decides where workers and caches run. Both turn an event into instructions,
``handle(event, now)``, which the coordinator's actors carry out.

A feed is an endless stream of blocks, and a consumer is a cursor on it. A block is a run of consecutive minibatches of
one epoch that is prepared, staged and delivered as a unit. It consists of parts, one for each home node of its samples.
Only minibatches of a consumer with its own batch size may span two blocks.

Modules:

================  ======================================================================================================
`state`           `StagingState.handle`: applies an event, then delivers blocks, drops blocks and assigns work
`events`          events and instructions of the staging state
`calls`           validates client calls and turns them into events
`consumers`       positions in the stream: consumers, reservations, cohorts
`reservations`    how long positions are held for trials that have not joined yet
`epochs`          the shuffle of each epoch; where a consumer may start in the middle of one
`keeping`         **Why does a block stay, and which one goes first?** `Keeping.reason`
`scheduling`      next task of each worker, and room for its block
`window`          staged blocks, their parts, and their byte budget
`holding`         share of that budget that consumers may hold, so that the next block always has room
`moving`          copies of parts from nodes that will be gone soon
`tasks`           tasks of each prep worker
`transitions`     states of parts, blocks, consumers and workers, and the allowed transitions
`story`           history of each block, consumer and worker
`explain`         why a consumer waits; consistency of the tables
`supervisor`      workers and caches. **When the last worker dies?** `Supervisor._match_worker_count`
`supervised`      phases of prep workers and cache nodes
`homes`           home nodes of samples, and when they change
`waits`           current waits of a feed, and when they are logged
`cluster_events`  events and instructions of the supervisor
`layout`          samples per block, bounds and budgets: fixed when a feed opens
`ranks`           division of minibatches among the ranks of a data-parallel trial, and their common start
`demand`          estimates from the last seconds: demand of trials, speed of prep
`pace`            which trials are split from a cohort because of their pace
`peer_idle`       idle time of prep while consumers wait for each other
`slot_use`        whether blocks are prepared in slots of workers' memory, and in how many
`ledgers`         samples received by each consumer in each of its epochs
================  ======================================================================================================

Each object changes its state in one method, ``transition``. ``validate`` checks every invariant. Tests call it after
every event of thousands of random schedules.
"""
