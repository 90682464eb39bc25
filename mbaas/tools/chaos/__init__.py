"""Runs a search under a seeded plan of faults and checks the samples its trials received: ``mbaas chaos``.

`injector` executes a `plan` of faults on a separate cluster of `nodes`, while the trials of `search` write `records`.
The `checker` verifies these without mbaas code. `usage` detects leaks.
"""
