"""Public test kit: a fake clock's worth of staging schedules, the ledger checker, and killers for real clusters."""
