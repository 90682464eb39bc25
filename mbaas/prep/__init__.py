"""Preparation: encoded bytes to the pixels of a minibatch, by one of several engines."""
