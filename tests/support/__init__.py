"""What several tests need: random schedules for the pure core, consumers that keep a record, leak checks."""
