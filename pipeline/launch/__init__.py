"""Launchers of a package: the same servers on one node, under Slurm, with mpirun, on Kubernetes and with docker compose.

`fleet.py` derives every number once; each launcher is a function from that to files (`render.py` lists them); `crosscheck.py`
reads the files back and compares them with the bundle. A new launcher is one function, and a reader of its files.
"""
