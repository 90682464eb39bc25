"""The analysis of a workload: measurement, prediction, verdict and report. `mbaas.analysis` has its public names."""
