"""The disk tier: samples on a local disk that do not fit in memory.

A cache node uses `tier`. `store` keeps samples in files, `folder` manages ownership of the folders, `index` records the
location of each sample, and `segments` contains their bytes.
"""
