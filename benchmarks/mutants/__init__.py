"""Mutation testing of the pure core: small mistakes that no test detects.

Existing tools are too slow here: mutmut copies the tree, cosmic-ray edits the working tree, and both start pytest for
each mutant. Imports then take four seconds before tests that take milliseconds. This package collects the tests once,
forks for each mutant, and replaces the code of functions in memory.
"""
