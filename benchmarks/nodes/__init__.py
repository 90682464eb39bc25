"""Nodes that share a feed against nodes that load alone, on local Ray clusters."""
