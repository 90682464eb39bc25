"""Runs a search under a seeded plan of faults and checks the samples its trials received: ``mbaas chaos``.

- `plan`: kinds and times of faults; pure.
- `participants`, `nodes`, `network`, `storage`: targets of faults, and the means to disturb them.
- `injector`: executes the plan on a separate cluster.
- `records`, `checker`: trials' records and their verification; the checker does not depend on mbaas.
- `search`, `server`: the default search that runs under faults, and the program that serves its feed.
- `usage`, `watch`: resource leaks; feeds that end, and their ledgers.
- `runner`, `report`: the whole run and its results.
"""
