"""Preparation: engines turn encoded samples into the arrays of a block.

`worker` is the actor, and `engines` constructs its engine. For images, `part_input` reads headers, `plan` draws the
random parameters, `cpu` or `dali` executes them, and `on_image` moves fields with image coordinates. `array_engine`
prepares audio (`sound`) and arrays (`array_files`); `dali_sound` makes spectrograms after the same first steps
(`array_steps`).
"""
