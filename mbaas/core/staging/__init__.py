"""The staging core: which blocks of a feed are prepared, delivered, kept and dropped.

==============  ========================================================================================================
`state`         `StagingState.handle`: applies an event, then delivers blocks, drops blocks and assigns work
`streams`       one stream of blocks for each pipeline, and the numbers of blocks
`events`        events and instructions of the staging state
`calls`         validates client calls and turns them into events
`consumers`     positions in the stream: consumers and their cohorts
`beginnings`    **Where does a consumer begin?** The table in its docstring
`regrouping`    which cohorts unite, and who moves to another one
`reservations`  for whom positions are held, where, and for how long
`epochs`        the shuffle of each epoch; where a consumer may start in the middle of one
`keeping`       **Why does a block stay, and which one goes first?** `Keeping.reason`
`scheduling`    next task of each worker, and room for its block
`turns`         whose turn it is, if consumers use several pipelines
`rooms`         each cohort's part of the staging budget, the share of it that consumers may hold, and slots of workers
`window`        staged blocks, their parts, and their byte budget
`moving`        copies of parts from nodes that will be gone soon
`tasks`         tasks of each prep worker
`transitions`   states of parts, blocks, consumers and workers, and the allowed transitions
`explain`       why a consumer waits; why a block is staged
`pace`          which trials are split from a cohort because of their pace
==============  ========================================================================================================
"""
