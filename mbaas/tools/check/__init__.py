"""Reads and decodes all samples of a dataset once, in several processes, and finds the bad ones.

`pool`     worker processes, which are replaced if a decoder crashes or hangs
`samples`  the check of some samples, in a worker process
`scan`     the whole dataset, in pieces, and the totals
"""
