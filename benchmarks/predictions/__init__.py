"""Predictions of `mbaas analyze` for other storage, batch sizes, nodes, networks and pipelines, against real feeds."""
