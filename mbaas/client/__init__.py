"""The consumer's side of a feed: from staged blocks to a trial's minibatches.

==============  ========================================================================================================
`join`          a consumer's options, its own pipeline, and its search for a restarted feed
`position`      a consumer's position: received, held, requested next; pure
`stream`        the blocks of a feed, in order: makes the calls that `position` decides, and reads the blocks
`rank_stream`   the blocks of a rank, in order, and agreement with the other ranks about beginnings and plans
`part_fetch`    reads the parts of a block, whole or only some rows
`sharding`      ends of minibatches, and the share of a rank in each
`batches`       cuts minibatches out of blocks, as views where possible, and reuses private memory
`convert`       minibatches as NumPy views, private tensors, or tensors on a device; fields that differ in length
`trainers`      iterators over an epoch, also for accelerate; a callback for the Hugging Face Trainer
`heartbeat`     renews leases and reports
`saved_state`   the JSON schema of a loader's state, and its checks
`ledger`        proof that an epoch was exact
`stalls`        waits of a trial: their timeouts and causes; pure
`totals`        what a loader reports: samples, waits, ledgers
==============  ========================================================================================================
"""
