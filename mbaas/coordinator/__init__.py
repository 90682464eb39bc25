"""The actors that run a feed: a Ray shell around the pure core."""
