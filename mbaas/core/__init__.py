"""The pure core: everything that decides, as plain Python without Ray, clocks, threads or files.

``StagingState.handle(event, now)`` takes what happened and answers with what to do; the coordinator's actors carry it
out. A map, each module in one line:

=============  =========================================================================================================
`events`       what can happen, and what the shell must then do
`state`        `StagingState.handle`: which event changes what; after each, deliver, drop, give out work
`consumers`    who is where in the stream: consumers, reservations, cohorts. **Must a block stay?** `Cohort.wants`
`scheduling`   which worker makes what next. **When is a block dropped?** `Scheduler.drop_unwanted`, `_make_room`
`window`       the staged blocks, their parts, and their budget of bytes
`tasks`        the prep workers, and what each has in hand
`transitions`  the states of parts, blocks, consumers and workers, and which may follow which
`layout`       samples in a block, bounds and budgets: fixed when a feed opens
`ranks`        which rank of a data-parallel trial takes what, and where ranks begin together
`demand`       what the last seconds say: how much trials want, what prep can make
`story`        what happened to a block, a consumer or a worker
`explain`      why a consumer waits; whether the tables agree with each other
=============  =========================================================================================================

A state changes in one method, its owner's ``transition``. ``StagingState.validate`` checks every invariant; tests call
it after every event, in ten thousand random schedules.
"""
