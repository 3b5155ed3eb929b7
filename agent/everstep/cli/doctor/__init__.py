"""`everstep doctor`: what the present rights and this machine allow, and what to do about it."""
