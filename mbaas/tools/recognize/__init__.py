"""Recognises the kind of data in a folder, and describes a feed for it.

`look`   a bounded look at a folder: names, and the beginnings of some files
`kinds`  the decision: the reader, its options and the pipeline; pure
`text`   the feed file, with comments
"""
