"""One run, from its first process to its last file.

session starts the processes and builds the models; run is the state that the loop and observers
share; checkpoint and folder manage files; samples chooses the rows that are recorded; timeline says
what each process did; reporting tells all of it to the console, trackers and observers; validation
evaluates the actor on held-out data.
"""
