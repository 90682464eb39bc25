"""Runs a search under a seeded plan of faults, and checks what its trials got: ``mbaas chaos``.

- `plan`: which faults happen when; pure.
- `participants`, `nodes`, `network`, `storage`: who is struck, and how.
- `injector`: carries out the plan on a cluster of its own.
- `records`, `checker`: what trials wrote down, and what is wrong with it; the checker knows nothing of mbaas.
- `search`, `command`: what runs under faults: a search of our own, or any program.
- `usage`: what a run leaves behind or has ever more of.
- `runner`, `report`: all of it together, and what came of it.
"""
