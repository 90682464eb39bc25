"""The actors that run a feed: a Ray shell around the pure core.

================  ======================================================================================================
`actor`           the actor class of the coordinator; imports `coordinator` only in its own process
`coordinator`     runs a feed
`consumer_api`    calls of consumers
`service`         the shell around the staging core
`own_pipelines`   pipelines that consumers bring
`opening`         starts the workers of a new feed, or finds those of an earlier coordinator
`supervision`     the shell around the supervisor: turns its instructions into calls
`engine_decision` the engine of a new feed, measured if both are possible
`worker_pool`     starts, briefs and ends prep workers
`cache_pool`      starts, briefs and ends cache nodes; computes placements
`lending`         lends workers to other feeds: calls between their coordinators, and one feed's side of it
`cache_monitor`   notes what cache nodes log, and tells them the rate of prep
`recovery`        state that a coordinator leaves to its successor
`registry`        the program that serves each feed, the resources that it claims, and the lock for dividing them
`background`      background tasks; handling of internal errors; waits for answers of other actors
`control`         calls of `Feed`, commands and the Tune callback
`counters`        work done so far
`status_report`   the contents of `mbaas status`, and the history of a block, consumer, worker or cache node
================  ======================================================================================================
"""
