"""Making a draft for a target: the target writes, a small model trains on it, the engine judges it."""
