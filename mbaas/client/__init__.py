"""The consumer's side of a feed: from staged blocks to a trial's minibatches.

=============  =========================================================================================================
`join`         builds the stream that fits a feed and a consumer
`loop`         the iterator of an epoch, which continues after an error
`position`     a consumer's position: received, held, requested next; pure
`session`      a consumer's session, which makes the calls that `position` decides
`stream`       the blocks of a feed, in order
`rank_stream`  the blocks of a rank, in order
`part_fetch`   reads the parts of a block, whole or only some rows
`rank_group`   agreement with the other ranks about beginnings and plans
`sharding`     ends of minibatches, and the share of a rank in each
`batches`      cuts minibatches out of blocks, as views where possible
`convert`      minibatches as NumPy views, private tensors, or tensors on a device
`collate`      fields whose values differ in length, images that differ in size
`recycled`     private memory for minibatches, reused when unreferenced
`numbered`     minibatches of an epoch by number, for a trainer of accelerate that resumes
`accelerate`   the end of an epoch, as accelerate expects it
`patience`     when a wait for a block ends, and when it is logged; pure
`heartbeat`    renews leases and reports
`rpc`          reads of staged parts with deadlines
`successor`    waits for a feed restart
`saved_state`  the JSON schema of a loader's state, and its checks
`ledger`       proof that an epoch was exact
`stalls`       time that a trial waited, and for what
=============  =========================================================================================================
"""
