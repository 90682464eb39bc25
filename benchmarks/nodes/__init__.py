"""Nodes that share a feed against the same nodes that load alone, on local Ray clusters."""
