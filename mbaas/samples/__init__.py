"""Order, homes and fields of samples. Pure functions of a few numbers."""
