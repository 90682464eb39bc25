"""Pictures of prepared samples: for `mbaas show`, and for a notebook that shows a feed.

`grid` draws images beside each other, `samples` makes them of what a feed prepares.
"""
