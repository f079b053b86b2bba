"""Files of weights: strangers' read without running what is in them, ours with a note, released layouts as tables."""
