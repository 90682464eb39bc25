"""The disk tier: raw samples on a local disk, for which memory has no room."""
