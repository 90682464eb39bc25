"""The consumer's side of a feed: from staged blocks to a trial's minibatches.

===============  =======================================================================================================
`join`           builds the stream that fits a feed and a consumer; joins again after a feed restart
`block_calls`    calls for blocks, over a socket or through Ray
`lane_position`  a consumer's position in a lane: received, held, requested next; pure
`session`        the session in one lane, which makes the calls that `lane_position` decides
`stream`         the blocks of a feed with one lane, in order
`lane_stream`    the blocks of a feed with several lanes, in order
`rank_stream`    the blocks of a rank, in order
`part_fetch`     reads the parts of a block, whole or only some rows
`rank_group`     agreement with the other ranks about beginnings and plans
`sharding`       ends of minibatches, and the share of a rank in each
`batches`        cuts minibatches out of blocks, as views where possible, and reuses private memory
`convert`        minibatches as NumPy views, private tensors, or tensors on a device
`collate`        fields whose values differ in length, images that differ in size
`trainers`       iterators over an epoch, also for trainers of accelerate and Hugging Face
`heartbeat`      renews leases and reports
`rpc`            calls with deadlines
`saved_state`    the JSON schema of a loader's state, and its checks
`ledger`         proof that an epoch was exact
`stalls`         waits of a trial: their timeouts and causes; pure
===============  =======================================================================================================
"""
