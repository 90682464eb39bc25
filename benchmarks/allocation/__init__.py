"""Jobs of different needs that arrive and end on one pool of prep workers, as in A-Dloader's experiment (table III)."""
