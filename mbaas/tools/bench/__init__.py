"""The side-by-side benchmark behind `mbaas bench`.

`runner` runs the rows (modules of `rows`) for a task (modules of `tasks`). `host` is the process of one row,
with its trials. `cpu` measures costs, `report` summarizes, and `render` shows the result.

Nothing is imported here, so that the processes of one row do not load the libraries of another.
"""

SAMPLES = 1500
"""Default number of generated photographs or audio files."""
