"""Preparation: encoded samples become the arrays of a block, in one of several engines.

`worker` has the actor; `engines` chooses and makes the engine, `cpu` and `dali` are the two, `part_input` reads
headers, and `plan` draws the random parameters that both execute. `on_image` moves the fields that lie on the image.
`preview` prepares the first samples of an epoch without a feed.
"""
