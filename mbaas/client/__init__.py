"""From staged blocks to a trial's minibatches: the stream of blocks, the cut, the form, the ledger."""
