"""Nodes for Ray's autoscaler on this machine: the head process loads this module as an external provider."""

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class LocalProvider(FakeMultiNodeProvider):
    """Ray's own provider for its tests, under a name that its configuration can give."""
