"""Node agents on the machines of a Ray cluster.

Ray says which machines there are, places one actor on each, and holds their GPUs for us. The actor starts the machine's
node agent; with the agents the service speaks as ``engines/cluster`` does, whether Ray's head is there or not.
"""
