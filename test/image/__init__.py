"""The image: its files are valid, its scripts do what they say, the lock is what it is taken for."""
