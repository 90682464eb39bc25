"""The model of a feed's speed, and the decisions that follow from it. Pure: no Ray, clock, thread or I/O."""
