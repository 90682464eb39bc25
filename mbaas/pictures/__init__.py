"""Pictures of prepared samples, for `mbaas show` and for notebooks.

`grid` draws images side by side; `samples` draws the samples that a feed prepares.
"""
