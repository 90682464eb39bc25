"""The supervisor: a feed's prep workers and cache nodes, and the home nodes of its samples.

============  ==========================================================================================================
`supervisor`  workers and caches. **When the last worker dies?** `Supervisor._match_worker_count`
`supervised`  phases of prep workers and cache nodes
`homes`       home nodes of samples, and when they change
`waits`       current waits of a feed, and when they are logged
`events`      events and instructions of the supervisor
============  ==========================================================================================================
"""
