"""One run, from its first process to its last file.

session starts the processes and builds the models; run is the state that the loop and observers
share; checkpoint and folder manage files; reporting and timeline report metrics and times;
validation evaluates the actor on held-out data.
"""
