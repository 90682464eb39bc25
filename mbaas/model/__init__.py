"""The model of a feed's speed, and the decisions that follow from it. Pure: no Ray, clock, thread or I/O.

- `quantity`, `words`: numbers with intervals; quantities, settings and resources as text.
- `curves`: rate against the number of workers, threads or readers, given, measured or fitted.
- `rates`: measured rates of a machine and a workload, and the setup to predict.
- `tiers`: storage tiers of a node, use of its disk, and read-ahead depth (NoPFS).
- `page_cache`: hits of Linux's page cache in random orders.
- `supply`: seconds of each resource for a sample, and where samples come from (DS-Analyzer).
- `pace`: predictions from these seconds, sufficient amounts and the bottleneck.
- `forms`: shares of a node's samples to cache encoded and decoded, in memory and on disk.
- `engine_choice`: the engine of a feed, by the rates of both.
- `gpu_stages`: the stage at which samples cross to the GPU.
- `threads`: fetch and prep threads of a machine, and reading threads between jobs (Lobster).
- `loading`: the curve of a running feed, from its own measurements (A-Dloader).
- `scaling`: number of prep workers of the cluster, and the machines that are released.
- `gains`: the gain of each change of the workers, as predicted and as it came.
- `lending`: prep workers of concurrent feeds (A-Dloader), and the default number of a feed.
- `sharing`, `waits`: deliveries and costs of a feed's samples; waits of its trials and ranks.
- `balance`: samples of a minibatch between ranks.
"""
