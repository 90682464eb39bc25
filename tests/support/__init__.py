"""Helpers shared by tests: random schedules for the pure core, consumers that keep records, leak checks."""
