"""Checks of a machine or a cluster before a feed is served: collected facts, and a verdict on each."""
