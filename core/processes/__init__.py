"""What each process of a run does, for whoever waits for it: written by itself, read by others."""
