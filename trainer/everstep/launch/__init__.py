"""torchrun's doors: rendezvous, logs, and what keeps ranks from outliving their generation."""
