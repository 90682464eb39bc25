"""Preparation: engines turn encoded samples into the arrays of a block.

`worker`           the actor, which prepares blocks for one feed at a time
`engines`          the engine protocol, the choice of an engine, and the engines
`process`          threads, GPU and stall watchdog of a worker process
`probe`            measures the costs of some samples, and both engines on them
`header`           headers of images: format, size, orientation
`decode`           pixels of images, by libjpeg-turbo and OpenCV
`sound`            audio files
`decoded`          decoded samples: containers, memory, and their way to a cache
`geometry`         the plan of a part's steps; boxes, keypoints and masks moved by it
`pixels`           crops, resampling, colors and other operations on the CPU
`part`             fields and results of the samples of a part; calls the functions of Maps
"""
