"""The values exchanged between processes: coordinators, prep workers, cache nodes and consumers. All are frozen.

They are separate from the actors, so that a trial that joins a feed imports no actor. Classes that users see, for
example as parts of a `FeedStatus`, are dataclasses. Internal messages and events are msgspec Structs: every process of
a feed creates these classes when it starts, which takes 0.6 ms for a dataclass and 0.05 ms for a Struct.

A sample has three forms between storage and a trial:

- ``encoded``: the stored bytes of one sample, such as a JPEG file: ``uint8[nbytes]``. A slab holds many of these end to
  end.
- ``arrays``: the prepared samples of a part of a block, field by field, as `mbaas.samples.fields.Arrays`. A block
  consists of the arrays of its parts.
- ``minibatch``: the samples that a trial gets at once, cut from the arrays of one or more blocks.
"""
