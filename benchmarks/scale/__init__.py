"""A model of large feeds: calibrated on this machine, checked against small real feeds, and let grow."""
