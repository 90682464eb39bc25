"""The consumer's side of a feed: from blocks in staging to a trial's minibatches.

From the feed to the trial: `session` is a consumer's session in one lane. `stream`, `lane_stream` and `rank_stream`
return blocks in the feed's order. `part_fetch` reads them, `batches` cuts minibatches, `convert` converts these to the
trial's format, and `ledger` proves that an epoch was exact. `join` connects these modules. No module here imports an
actor: a trial uses only actor handles and the values in `mbaas.messages`.
"""
