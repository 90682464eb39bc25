"""Pictures of prepared samples, for `mbaas show` and for notebooks.

`preview` prepares the first samples of an epoch, `samples` draws them, and `grid` draws images side by side.
"""
