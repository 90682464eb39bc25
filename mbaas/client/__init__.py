"""The consumer's side of a feed: from blocks in staging to a trial's minibatches.

In the order from the feed to the trial: `session` is a consumer's session in one lane; `stream`, `lane_stream` and
`rank_stream` give blocks in the feed's order, whatever lanes and ranks there are; `part_fetch` reads them, `batches`
cuts minibatches, `convert` gives these the form that the trial wants, and `ledger` proves that an epoch was exact.
`join` puts all of it together. Nothing here imports an actor: a trial knows the service by the handles of its actors
and by the values in `mbaas.messages`.
"""
