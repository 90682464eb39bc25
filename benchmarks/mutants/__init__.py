"""Mutation testing of the pure core: which small mistakes in it would no test notice?

A library was looked at first. mutmut copies the tree, and cosmic-ray edits the working tree; both begin pytest anew for
each mutant, which here means four seconds for imports before a test that takes milliseconds. This one collects the
tests once, forks for each mutant, and gives the mistake to the functions in memory.
"""
