"""Preparation: engines turn encoded samples into the arrays of a block.

`worker` contains the actor; `engines` chooses and constructs the engine. `cpu` and `dali` are the engines for images:
`part_input` reads headers, `plan` draws the random parameters for both, and `on_image` moves fields with image
coordinates. `array_engine` prepares audio (`sound`) and arrays (`array_files`). `dali_sound` uses the same first steps
(`array_steps`), and makes spectrograms with DALI. `dali_runs` runs the graphs of both DALI engines. `preview` prepares
the first samples of an epoch without a feed.
"""
