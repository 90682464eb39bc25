"""Measure what the models need: G, P, S and C as DS-Analyzer defines them (VLDB 2021), and what sharing costs.

- `effort`: repeats a measurement until its spread is small.
- `steps`: G, a training step on synthetic data that lies on its device.
- `prep`: P, prep alone with its bytes in memory, against workers and threads; `decoded`: samples to measure it with
  that are decoded already.
- `portion`: parts of a dataset, slower storage, and files that are not in the page cache.
- `storage`: S, random reads of cold storage against readers; the rate of a disk tier's disk; C, of cached bytes.
- `service`: real feeds with real trials: what they take, wait for and cost.
- `system`: the `Rates` of this machine, from all of these.
- `verify`: splits an epoch into compute and both stalls, and runs what was predicted.
"""
