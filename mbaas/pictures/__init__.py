"""Pictures of prepared samples, for `mbaas show` and for notebooks.

`samples` prepares the first samples of an epoch and draws them, and `grid` draws images side by side.
"""
