"""Patches that are planted to be found by `bench bisect`."""
