"""The disk tier: samples on a local disk that do not fit in memory. `tier` is its interface for a cache node."""
