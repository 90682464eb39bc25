"""The side-by-side benchmark that `mbaas bench` runs.

`runner` measures the prep rate P of all cores, a PyTorch DataLoader per trial, DALI per trial and one mbaas feed (each
a module of `rows`), for images, object detection or sound (each a module of `tasks`). `host` is the process of one row,
`trial` the consumer in it, `cpu` counts what it costs; `report` sums up, and `render` shows the result.

Nothing is imported here, so that the processes of one row do not pay for the libraries of another.
"""

SAMPLES = 1500
"""How many photographs or recordings are made, unless somebody says."""
