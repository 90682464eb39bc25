"""The charts of the documents, drawn from the tables in ``docs/results``.

`results` reads the tables, `drawing` draws bars and makes SVG files, `structure` draws the parts of a feed, and
`charts` lists the charts.
"""
