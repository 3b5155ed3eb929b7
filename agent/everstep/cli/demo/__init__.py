"""`everstep demo`: a small cluster on this machine, and every fault we promise to survive."""
