"""Records: the keys of a run, its small objects and their strict codecs."""
