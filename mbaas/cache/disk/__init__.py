"""The disk tier: encoded samples on a local disk, for which memory has no room.

`tier` is what a cache node uses, `store` keeps samples in files, `folder` says whose these are, `index` tells where
each sample lies, and `segments` are the files with their bytes.
"""
