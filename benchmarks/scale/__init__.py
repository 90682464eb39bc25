"""A model of large feeds, calibrated on this machine and checked against small real feeds."""
