"""A folder for PYTHONPATH: its `sitecustomize.py` makes a nursery of the interpreter."""

ROLE, PYTHONPATH = "EVERSTEP_NURSERY", "EVERSTEP_NURSERY_PYTHONPATH"
PROBE = "probe"
