"""Ray Tune integration of mbaas: a callback for the search, and a loader for its trials.

::

    tune.Tuner(train, run_config=tune.RunConfig(callbacks=[FeedCallback("train")])).fit()
    loader = get_loader("train", batch_size=config["batch_size"])     # in train(config)
"""

from tune_integration.callback import FeedCallback
from tune_integration.trial import get_loader

__all__ = ["FeedCallback", "get_loader"]
