"""One run, from its first process to its last file.

session starts the processes and builds the models; run is the state that the loop and observers
share; checkpoint and folder keep files; reporting and timeline say how it goes;
validation measures the actor on held-out data.
"""
