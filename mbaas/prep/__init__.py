"""Preparation: encoded samples become the arrays of a block, in one of several engines.

`worker` has the actor; `engines` chooses and makes the engine. `cpu` and `dali` are the two for images: `part_input`
reads headers, `plan` draws the random parameters that both execute, and `on_image` moves the fields that lie on the
image. `array_engine` is that for sound (`sound`) and arrays (`array_files`); `dali_sound` has the same first steps
(`array_steps`), and makes spectrograms with DALI. `dali_runs` runs the graphs of both engines of DALI. `preview`
prepares the first samples of an epoch without a feed.
"""
