"""Which samples, in which order, where and with which fields. Pure functions of a few numbers."""
