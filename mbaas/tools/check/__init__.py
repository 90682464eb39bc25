"""Reads and decodes all samples of a dataset once, in several processes, and finds the bad ones.

`pool`     processes that survive the samples on which a decoder crashes or hangs
`samples`  the check of some samples, in one of these processes
`scan`     the whole dataset: pieces, totals and the report
"""
