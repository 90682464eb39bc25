"""The side-by-side benchmark: what `mbaas bench` runs.

``run`` measures the prep rate P of all cores, a PyTorch DataLoader per trial, DALI per trial and one mbaas feed;
``mbaas.bench.render`` shows the result.

Nothing is imported here, so that the processes of one row do not pay for the libraries of another:
``from mbaas.bench.runner import run``.
"""
