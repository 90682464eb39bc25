"""Measurement of the models' inputs: G, P, S and C as in DS-Analyzer (VLDB 2021), and the costs of sharing.

- `effort`: repeats a measurement until its spread is small; progress and saved results of an analysis.
- `prep`: P, prep alone with data in memory, against workers and threads; the machine's speed over time.
- `storage`: S, random reads of cold storage against readers; the rate of a disk tier's disk; C, the rate of memory;
  parts of a dataset, slower storage, and files outside the page cache.
- `service`: G, a training step on synthetic data on its device; real trials: speed, stalls and costs of feeds; prep on
  GPUs that train.
- `system`: the `Rates` of this machine, from all of these.
- `verify`: splits an epoch into compute and both stalls, and checks predictions.
"""
