"""The engine over several machines: the service decides, one node agent per machine runs what is decided.

Service and agents each have a folder per job; ``job_folder.py`` says which of its files travel, and in which
direction. ``node_agent.py`` runs on the machine (``agent_server.py`` is its HTTP server), ``node_link.py`` connects the
service to one agent, and ``cluster_nodes.py`` makes all of them look to the engine like one machine
(``engines/local/machines.py``).
"""
