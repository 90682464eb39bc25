"""Hit rate of Linux's page cache when samples are read in a new random order each epoch, against the model."""
