"""Staging: the pure core (cohorts, window, crew) and the coordinator that runs it."""
