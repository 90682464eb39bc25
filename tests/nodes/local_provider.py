"""Nodes on this machine for Ray's autoscaler: the head process loads this module as an external provider."""

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class LocalProvider(FakeMultiNodeProvider):
    """Ray's provider for its own tests, under a name that its configuration can reference."""
