"""The consumer's side of a feed: from blocks in staging to a trial's minibatches.

From the feed to the trial: `session` (a consumer's place in one lane), `stream`, `lane_stream` and `rank_stream` (the
blocks in the feed's order, however they come), `part_fetch` (reading them), `batches` (cutting minibatches), `convert`
(their form), `ledger` (the proof that an epoch was exact). `join` puts them together. Nothing here imports an actor: a
trial knows the service by the handles of its actors and by the values in `mbaas.messages`.
"""
