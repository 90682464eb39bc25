"""The calls of consumers to coordinators, and how they travel.

================  =====================================================================================
module            contents
================  =====================================================================================
`encoding`        messages as bytes, checked when they are decoded; errors and object references in them
`socket`          Unix sockets between processes of one machine and one user
`client`          the consumer's end: over a socket or through Ray
`server`          the coordinator's end: its own socket, and relays on other machines
`relay`           a machine's proxy for a coordinator on another machine
================  =====================================================================================

A call of a consumer is one Struct of `mbaas.wire`. It travels as msgpack, and all its types and bounds are checked
when it is decoded, in both directions. Nothing that arrives over a socket is unpickled.
"""
