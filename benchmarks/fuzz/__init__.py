"""Fuzzing: every reader of foreign data gets damaged and hostile input, and must answer with an error of mbaas.

`mutations` damages bytes and values, and `targets` defines the fuzzed functions and the allowed results. `run` executes
cases in a separate process, so that crashes of C libraries, hangs and excessive memory count as findings.
"""
