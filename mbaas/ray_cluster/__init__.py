"""Everything that depends on Ray's cluster: connection, resources, names of actors, metrics.

The only room that uses names that Ray does not publish.
"""
