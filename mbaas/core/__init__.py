"""All decisions of a feed, as pure Python without Ray, clocks, threads or files.

There are two state machines. `staging` decides which blocks are prepared, delivered, kept and dropped; `cluster`
decides where workers and caches run. Both turn an event into instructions, ``handle(event, now)``, which the
coordinator's actors carry out.

A feed is an endless stream of blocks, and a consumer is a cursor on it. A block is a run of consecutive minibatches of
one epoch that is prepared, staged and delivered as a unit. It consists of parts, one for each home node of its samples.
Only minibatches of a consumer with its own batch size may span two blocks.

Modules:

===========  ===========================================================================================================
`staging`    blocks and consumers: `StagingState`, and the modules that it is made of
`cluster`    prep workers, cache nodes and homes: `Supervisor`
`story`      history of each block, consumer and worker
`kept_form`  form of decoded samples, chosen for all pipelines in use
`layout`     samples per block, bounds and budgets: fixed when a feed opens
`ranks`      division of minibatches among the ranks of a data-parallel trial, and their common start
`demand`     estimates from the last seconds: demand of trials, speed of prep
`peer_idle`  idle time of prep while consumers wait for each other
`ledgers`    samples received by each consumer in each of its epochs
===========  ===========================================================================================================

Each object changes its state in one method, ``transition``. ``validate`` checks every invariant. Tests call it after
every event of thousands of random schedules.
"""
