"""Helpers without any knowledge of feeds: units, validation, files, progress."""
