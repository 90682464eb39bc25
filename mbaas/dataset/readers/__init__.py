"""Readers, a module for each format, and the parts that they share."""
