"""Fuzzing: everything that reads what others wrote is given damaged and hostile things, and must answer with an error.

`mutations` damages bytes and values, `targets` says what is fuzzed and what may come of it, `run` has cases run in a
process of their own, so that a crash of a C library, a wait without an end or gigabytes are a finding like any other.
"""
